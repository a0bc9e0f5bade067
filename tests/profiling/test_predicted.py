"""Bytes and seconds of fake tensors are those measured, also where backwards add up gradients."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rotor_profiling import RandomState, measure_loss, memory_meter, optimizer_cost, storage_bytes, storages
from rotor_profiling.backends import Storages, prediction, stopwatch, using
from rotor_profiling.memory import Phase
from rotor_profiling.storage import equal
from rotor_py.estimation.fake_tensors import DeviceFakeMode
from rotor_py.estimation.simulated_target import PredictedDevice
from tests.checkpointable.steps import CPU

SIDE = 64
NUMBERS = 600
"""Bytes of losses and other single numbers: what operators wrap as tensors, no dispatch shows."""


class SumsInItsBackward(torch.autograd.Function):
    """Sums in Python a gradient that waits and one that is made there, not in place."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(one)
        return one * other.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (one,) = ctx.saved_tensors
        product = gradient * one
        return product + gradient, gradient


class BackwardInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            used = leaf * 1
            output = used.sin() + used.cos() + used.exp() + leaf
        return torch.autograd.grad(output, leaf, gradient)[0]


def sines(value: torch.Tensor) -> torch.Tensor:
    return value.sin() + value.cos() * value


OF_ONE: list[Callable[[Any], Any]] = [
    torch.sin,
    torch.exp,
    torch.relu,
    torch.clone,
    torch.t,
    lambda each: each.clone().mul_(2),
    lambda each: each.reshape(-1).view(SIDE, SIDE),
    lambda each: torch.cat(each.chunk(2)),
    lambda each: each[: SIDE // 2].repeat(2, 1),
    lambda each: each.detach().requires_grad_() + each,
    BackwardInBackward.apply,
    lambda each: checkpoint(sines, each, use_reentrant=False, preserve_rng_state=False),
    lambda each: checkpoint(sines, each, use_reentrant=True, preserve_rng_state=False),
]
OF_TWO: list[Callable[[Any, Any], Any]] = [
    torch.add,
    torch.mul,
    torch.mm,
    SumsInItsBackward.apply,
    lambda one, other: one / (other * other + 1),
]


def phases_of(seed: int) -> dict[str, Phase]:
    """Memory of a forward and a backward, of a graph in which tensors are used again, viewed, hooked and kept."""
    draw = random.Random(seed)
    kept: list[Any] = []
    hooks = (lambda gradient: gradient * 2, lambda gradient: gradient + gradient, lambda gradient: None, kept.append)
    parameters = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(draw.randint(1, 2))]
    with memory_meter(CPU) as meter:
        meter.mark("forward")
        found = [each * 1 if draw.random() < 0.7 else each for each in parameters]
        for _ in range(draw.randint(2, 12)):
            operator = draw.choice((OF_ONE, OF_TWO))
            made = draw.choice(operator)(*(draw.choice(found) for _ in range(1 if operator is OF_ONE else 2)))
            if draw.random() < 0.3:
                made.register_hook(draw.choice(hooks))
            elif draw.random() < 0.1:
                made.retain_grad()
            found.append(made)
        loss = torch.stack([(each * each).sum() for each in found if draw.random() < 0.6 or each is made]).sum()
        if draw.random() < 0.5:
            kept.append(found)
        del found, made
        meter.mark("backward")
        if draw.random() < 0.2:
            loss.backward(retain_graph=True)
            meter.mark("again")
        loss.backward()
        meter.mark("end")
        kept.clear()
        del loss
    return meter.phases


def predicted(run: Callable[[], Any]) -> Any:
    with using(PredictedDevice("cpu", 10**12, lambda *call: 1e-6)), DeviceFakeMode():
        return run()


@pytest.mark.filterwarnings("ignore:.*checkpoint.*", "ignore:.*requires_grad.*")
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 150), marks=pytest.mark.slow)])
def test_predicted_memory_of_random_backwards_is_the_measured_one_to_the_tensor(seeds: range) -> None:
    for seed in seeds:
        phases_of(seed)  # libraries allocate once for themselves
        measured, found = phases_of(seed), predicted(partial(phases_of, seed))
        for name, phase in measured.items():
            expected = pytest.approx((phase.peak, phase.end), abs=NUMBERS)
            assert (found[name].peak, found[name].end) == expected, (seed, name)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "three uses": lambda value: value.exp() + value.cos() + value.sin(),
    # With a graph of the backward, the engine does not add in place, although it alone holds the gradients.
    "nothing saved": lambda value: value * 2 + value * 3,
    # The gradient of the sum is a single number, seen as large as the tensor: nothing can be added to it.
    "an expanded gradient first": lambda value: value * value + value.sum(),
    "one gradient for both": lambda value: (value + value) * 2,
    # PyTorch's formula for its backward adds two tensors of its own, and not in place.
    "a sum in a formula": lambda value: torch.mul(*torch.var_mean(value, 1, keepdim=True)),
}


def peak(function: Callable[[torch.Tensor], torch.Tensor], around: Any = nullcontext, with_graph: bool = False) -> int:
    value = torch.randn(SIDE, SIDE, requires_grad=True) * 1
    output = function(value).sum()
    with memory_meter(CPU) as meter, around():
        torch.autograd.grad(output, value, create_graph=with_graph)
    return meter.phases[""].peak


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("with_graph", [False, True])
def test_gradients_are_predicted_to_be_added_in_place_where_the_engine_does(name: str, with_graph: bool) -> None:
    run = partial(peak, FUNCTIONS[name], with_graph=with_graph)
    run()  # libraries allocate once for themselves
    measured = run()
    assert predicted(run) == pytest.approx(measured, abs=NUMBERS)
    assert predicted(partial(run, around=BaseTorchDispatchMode)) == predicted(run)


device = partial(PredictedDevice, kind="cpu", memory_bytes=10**12, seconds=lambda *call: 1.0)


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
    assert watch.exact


def test_the_random_stream_of_the_process_is_left_alone_by_tensors_without_values() -> None:
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


def test_losses_and_optimizers_of_fake_tensors_cost_what_is_measured() -> None:
    for cost in (loss_bytes, *(partial(optimizer_bytes, each) for each in (torch.optim.AdamW, torch.optim.Adafactor))):
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
