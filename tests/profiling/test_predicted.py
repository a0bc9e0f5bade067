"""Backend for a device that is not there: what they read of tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rotor_profiling import RandomState, measure_loss, memory_meter, optimizer_cost, storage_bytes, storages
from rotor_profiling.backends import Storages, prediction, stopwatch, using
from rotor_profiling.memory import Phase
from rotor_profiling.storage import equal
from rotor_py.estimation.simulated_target import PredictedDevice
from tests.profiling.costs import CPU


def device(**options: object) -> PredictedDevice:
    given: dict[str, object] = {"kind": "cpu", "memory_bytes": 10**12, "seconds": lambda *call: 1.0, **options}
    return PredictedDevice(**given)  # type: ignore[arg-type]  # by name


def test_scratch_of_kernels_counts_while_they_run_and_older_tensors_do_not_count_when_freed() -> None:
    with using(device(scratch=lambda func, *rest: 10_000 if "mm" in str(func) else 0)), FakeTensorMode():
        left, old = torch.empty(10, 10), torch.empty(1000)
        with memory_meter(CPU) as meter:
            product = left @ left
            del old
            meter.mark("after")
            double = product + product
    assert meter.phases == {"": Phase(0, 10_400, 400), "after": Phase(400, 800, 800)}
    del double


def test_sizes_are_those_of_the_device_that_is_predicted() -> None:
    with using(device(kind="cuda", storages=Storages(512, fake=True))), FakeTensorMode():
        tensor = torch.empty(3)
        assert storage_bytes([tensor, tensor.view(3, 1), torch.empty(0)]) == 512
        with memory_meter(CPU) as meter:
            kept = torch.empty(129)
        assert meter.phases[""].kept == 1024
        assert len(storages([tensor, kept])) == 2
    with pytest.raises(KeyError), using(device(kind="cuda")):
        raise KeyError
    assert prediction() is None
    assert storage_bytes([torch.empty(3)]) == 12


def test_the_predicted_clock_adds_up_operators() -> None:
    seconds = {torch.ops.aten.add: 2.0, torch.ops.aten.mul: 0.5}
    with (
        using(device(seconds=lambda func, *call: seconds.get(func.overloadpacket, 0.0))),
        FakeTensorMode(),
        stopwatch(CPU) as watch,
    ):
        one = torch.ones(2)
        watch.start()
        one + one * one
        watch.lap()
        one.view(2)
        watch.lap()
        assert watch.stop() == [2.5, 0.0]
        watch.start()
        one * one
        watch.lap()
        assert watch.stop() == [0.5]
    assert watch.exact


def test_the_random_stream_of_the_process_is_left_alone_by_tensors_without_values() -> None:
    torch.manual_seed(3)
    before = RandomState.now(())
    with FakeTensorMode():
        state = RandomState.now(())
        torch.randn(5)
        state.restore()
        assert RandomState.now(()) == before == state
        assert equal(torch.zeros(2), torch.ones(2))  # without values, if they look alike
        assert not equal(torch.zeros(2), torch.zeros(3))
    assert RandomState.now(()) == before


def loss_bytes() -> tuple[int, int]:
    output, target = torch.randn(16, 100, requires_grad=True), torch.zeros(16, dtype=torch.long)
    found = measure_loss(lambda made: nn.functional.cross_entropy(made, target), output, device=CPU, output_bytes=6400)
    return found.temp_bytes, found.kept_bytes


def optimizer_bytes(make: Callable[..., torch.optim.Optimizer]) -> tuple[int, int]:
    found = optimizer_cost(make(nn.Linear(100, 30).parameters(), lr=0.1))
    return found.state_bytes, found.step_bytes


COSTS = [loss_bytes, *(partial(optimizer_bytes, getattr(torch.optim, name)) for name in ("AdamW", "Adafactor"))]


@pytest.mark.parametrize("cost", COSTS)
def test_losses_and_optimizers_of_fake_tensors_cost_what_is_measured(cost: Callable[[], tuple[int, int]]) -> None:
    measured = cost()
    with using(device()), FakeTensorMode():
        assert cost() == measured


def test_for_cuda_an_optimizer_steps_as_it_does_there() -> None:
    """Several tensors at once, unless it is fused; then it counts steps on the device, a block for each parameter."""
    with using(device(kind="cuda", storages=Storages(512, fake=True))), FakeTensorMode():
        layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
        together = optimizer_cost(torch.optim.AdamW(layers.parameters()))
        fused = optimizer_cost(torch.optim.AdamW(layers.parameters(), fused=True))
        capturable = optimizer_cost(torch.optim.AdamW(layers.parameters(), capturable=True))
        parameter_bytes = storage_bytes(layers.parameters())
    assert fused.step_bytes < together.step_bytes / 2
    assert together.step_bytes >= 4 * 128 * 128 * 4
    assert together.state_bytes == 2 * parameter_bytes
    assert fused.state_bytes == capturable.state_bytes == together.state_bytes + 8 * 512
