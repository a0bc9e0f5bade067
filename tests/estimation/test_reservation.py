"""Steps on fake tensors: their allocator requests, and what the allocator reserves for them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rotor_profiling import measured_peak, tensors_in
from rotor_profiling.backends import using
from rotor_py import Checkpointable, estimate
from rotor_py.data_sheet import Device
from rotor_py.estimation.caching_allocator import Allocate, Event, Free, replay
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies
from rotor_py.estimation.simulated_step import FollowedStep, SimulatedStep, followed_by_plan, reservation_of
from rotor_py.estimation.simulated_target import prediction_for
from rotor_py.report import Report
from tests.checkpointable.steps import Residual, Stack, between

H100 = find_device("h100")
MiB = 2**20


class Layer(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(value).relu())


def layers() -> nn.Module:
    widths = [256, 704, 448, 832, 320, 960, 576, 256, 896, 384, 640, 1024, 512]
    return nn.Sequential(*(Layer(*pair) for pair in pairwise(widths)))


def test_a_step_that_is_followed_allocates_what_the_plan_says_and_leaves_nothing() -> None:
    model = Stack(*(Residual(nn.Linear(256, 1024), nn.SiLU(), nn.Linear(1024, 256)) for _ in range(3)))
    value, mode = torch.empty(8192, 256), DeviceFakeMode()
    without_memory = FakeCopies(mode)
    with using(prediction_for(H100)), mode:
        fake, sample = without_memory.model(model).train(), without_memory.value(value)
        optimizer = torch.optim.AdamW(fake.parameters())
        network = Checkpointable(fake, sample, loss=torch.mean, optimizer=optimizer, fresh_grads=True, cache=False)
        for share in (0.0, 0.6):
            sequence = network.compute_sequence(between(network, share))
            step = SimulatedStep(network, sample, torch.mean, optimizer, fresh_grads=True)
            followed = replay(followed_by_plan(step, H100).events).allocated_bytes
            assert ("^1" in str(sequence)) == (share > 0), "stored in part"
            assert followed == pytest.approx(network.budget.peak_bytes(sequence), rel=0.001)
            assert not optimizer.state
            assert [group["foreach"] for group in optimizer.param_groups] == [None]
            assert all(each.grad is None for each in network.parameters())
            assert network.watch is None


class Unread(Stack):
    """Two outputs, the second of which may get a gradient."""

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = super().forward(value)
        return value, value.exp()


def test_what_a_step_takes_stands_beside_what_the_plan_promises() -> None:
    """The promise holds for a loss that reads all; the given one reads one output."""

    def unread() -> nn.Module:
        return Unread(*(Residual(nn.Linear(256, 256, bias=False), nn.Tanh()) for _ in range(3)))

    value, told = torch.empty(8192, 256), {"optimizer": torch.optim.SGD, "loss": lambda outputs: outputs[0].mean()}
    found = estimate(unread, value, H100, **told, fresh_grads=True)
    assert 0 < found.reserved.step_bytes < found.peak_bytes - 0.9 * value.nbytes
    assert "a step (predicted)" in " ".join(str(found).split())


def with_memory(size: int) -> Device:
    return replace(H100, name="a small one", memory_bytes=H100.context_bytes + size)


def report(size: int, **options: Any) -> Report:
    batch, told = torch.empty(16384, 256, device="meta"), {"loss": torch.mean, "optimizer": torch.optim.SGD}
    return estimate(layers, batch, with_memory(size), fresh_grads=True, **told, **options)


@pytest.mark.slow
def test_the_default_limit_leaves_what_fragmentation_needs_and_a_users_limit_is_kept_and_warned_of() -> None:
    default, given = report(700 * MiB), report(700 * MiB, mem_limit="90%")
    assert given.peak_bytes <= given.mem_limit == int(0.9 * 700 * MiB)
    assert given.reserved.missing_bytes > 0 == default.reserved.missing_bytes
    assert default.peak_bytes <= default.mem_limit < given.mem_limit
    assert default.reserved.reserved_bytes <= 700 * MiB
    assert default.overhead > given.overhead > 1
    (warning,) = [each for each in given.remarks() if each.startswith("Warning")]
    assert "predicted to run out of memory although its tensors fit" in warning
    assert "expandable_segments:True, with which it fits" in warning
    assert not [each for each in default.remarks() if "Warning" in each]
    assert "reserved (predicted)" in str(default).replace("\N{NO-BREAK SPACE}", " ")


def test_what_fits_by_giving_segments_back_is_told_of_and_else_how_large_a_device_would_have_to_be() -> None:
    # Tensors of 100, 120, ... MiB, each of which needs a segment of its own.
    growing = [event for size in range(100, 200, 20) for event in (Allocate(size, size * MiB), Free(size))]
    found = reservation_of(growing, with_memory(250 * MiB))
    assert found.gives_back
    assert found.missing_bytes == 0
    warning = found.warning(180 * MiB)
    assert "takes time that is not counted" in warning
    plenty = reservation_of(growing, with_memory(800 * MiB))
    assert (plenty.reserved_bytes, plenty.gives_back, plenty.warning(180 * MiB)) == (700 * MiB, False, None)
    # Of every segment of 20 MiB, half stays in use, so none can be given back.
    events: list[Event] = [Allocate((part, key), 9 * MiB) for key in range(10) for part in "ab"]
    events += [Free(("a", key)) for key in range(10)]
    events += [Allocate("whole", 100 * MiB)]
    found = reservation_of(events, with_memory(250 * MiB))
    assert replay(events).allocated_bytes == 190 * MiB
    assert 0 <= found.reserved_bytes - replay(events).reserved_bytes <= 20 * MiB
    assert found.missing_bytes == found.reserved_bytes - 250 * MiB > 0
    assert "predicted to run out of memory although its tensors fit" in found.warning(200 * MiB)
    assert "with which it fits" not in found.warning(200 * MiB)
    assert "with which it fits" in replace(found, expandable_bytes=found.usable_bytes).warning(200 * MiB)


def held(events: list[Event]) -> tuple[int, int]:
    """Bytes at the most and at the end, without an allocator."""
    sizes: dict[object, int] = {}
    most = 0
    for event in events:
        sizes[event.key] = event.size if isinstance(event, Allocate) else 0
        most = max(most, sum(sizes.values()))
    return most, sum(sizes.values())


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.sample = torch.randn(256, 64)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.sample).square().mean().backward()
        self.optimizer.step()

    @property
    def present(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), self.sample]


def test_a_fake_step_holds_what_a_real_one_is_measured_to_hold() -> None:
    with FakeTensorMode():
        fake = Training()
        found = FollowedStep(fake.present)
        with found:
            fake.step()  # makes the optimizer's state
            fake.step()
    real = Training()
    real.step()
    real.optimizer.zero_grad()
    state = tensors_in([list(each.values()) for each in real.optimizer.state.values()])
    peak = measured_peak(real.step, [*real.present, *state], torch.device("cpu"))
    most, _ = held(found.events)
    assert most == pytest.approx(peak, rel=0.01)


def test_what_is_let_go_of_is_freed_and_what_stays_is_not() -> None:
    with FakeTensorMode(), FollowedStep() as step:
        kept = torch.empty(1000)
        torch.empty(500)
        view = kept[:10].view(2, 5)
    assert held(step.events) == (4000 + 2000, 4000)
    del kept
    assert held(step.events)[1] == 4000  # a view holds the whole
    del view
    assert held(step.events)[1] == 0
    with FakeTensorMode(), FollowedStep() as step:
        storage = torch.empty(1000).untyped_storage()
        for size in (0, 4000):  # as FSDP empties and fills what it gathers
            storage.resize_(size)
            assert held(step.events)[1] == size
    # Results in place are nothing new, and scratch comes and goes.
    with FakeTensorMode():
        table = nn.Embedding(1000, 8)
        tokens = torch.zeros(4000, dtype=torch.long)
        step = FollowedStep([table.weight, tokens])
        with step:
            table.weight.detach().add_(1.0)
            assert len(step.events) == 2
            table(tokens).sum().backward()
    scratch = [a.size for a, b in pairwise(step.events) if (type(a), type(b), a.key) == (Allocate, Free, b.key)]
    assert max(scratch) > 4000 * 8 * 4  # sums of rows in 32 bits
