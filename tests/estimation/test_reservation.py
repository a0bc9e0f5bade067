"""What the allocator reserves for a step by a plan, on a device that is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling.backends import using
from rotor_py import Checkpointable, estimate
from rotor_py.data_sheet import Device
from rotor_py.estimation.caching_allocator import Allocate, Event, Free, replay
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies
from rotor_py.estimation.reservation import followed_by_plan, reservation_of
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_py.estimation.simulated_target import prediction_for
from rotor_py.report import Report
from rotor_solver import store_all

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

H100 = find_device("h100")
MiB = 2**20


class Layer(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.linear = nn.Linear(given, made)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value).relu())


def layers() -> nn.Module:
    """What each of them makes fits badly where that of another was."""
    widths = [256, 704, 448, 832, 320, 960, 576, 256, 896, 384, 640, 1024, 512]
    return nn.Sequential(*(Layer(*pair) for pair in pairwise(widths)))


class Residual(nn.Module):
    """TorchDynamo captures it, and its stages may be stored in part."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(256, 1024) for _ in range(3))
        self.back = nn.ModuleList(nn.Linear(1024, 256) for _ in range(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for into, back in zip(self.into, self.back, strict=True):
            wide = into(value)
            value = value + back(nn.functional.silu(wide) * wide)
        return value


@contextmanager
def planned(model: nn.Module, value: Any, loss: Any, share: float) -> Iterator[SimulatedStep]:
    """A step by a plan for a limit between the least and storing everything."""
    mode = DeviceFakeMode()
    without_memory = FakeCopies(mode)
    with using(prediction_for(H100)), mode:
        fake, sample = without_memory.model(model).train(), without_memory.value(value)
        optimizer = torch.optim.AdamW(fake.parameters())
        network = Checkpointable(fake, loss=loss, optimizer=optimizer, fresh_grads=True, cache=False)
        network.measure(sample)
        budget = network.budget
        least, most = budget.least_bytes(), budget.peak_bytes(store_all(budget.chain))
        network.compute_sequence(int(least + share * (most - least)))
        yield SimulatedStep(network, sample, loss, optimizer, fresh_grads=True)


def peaks(step: SimulatedStep) -> tuple[int, int]:
    """Of tensors, while two steps follow the plan, and as the plan says."""
    budget, sequence = step.network.budget, step.network.sequence
    return replay(followed_by_plan(step, H100).events).allocated_bytes, budget.peak_bytes(sequence)


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_step_that_is_followed_allocates_what_the_plan_says(share: float) -> None:
    with planned(Residual(), torch.empty(8192, 256), torch.mean, share) as step:
        followed, predicted = peaks(step)
        assert ("^1" in str(step.network.sequence)) == (share > 0), "stored in part"
    assert followed == pytest.approx(predicted, rel=0.001)


def test_what_was_followed_leaves_nothing_and_several_tensors_are_stepped_at_once() -> None:
    with planned(Residual(), torch.empty(64, 256), torch.mean, 1.0) as step:
        followed, predicted = peaks(step)
        assert not step.optimizer.state
        assert [group["foreach"] for group in step.optimizer.param_groups] == [None]
        assert all(each.grad is None for each in step.network.parameters())
        assert step.network.watch is None
        # The peak is in the optimizer's step, where CUDA makes copies of all parameters.
        parameters = sum(each.numel() * 4 for each in step.network.parameters())
        assert followed > 4.9 * parameters
    assert followed == pytest.approx(predicted, rel=0.001)


class Unread(nn.Module):
    """Two outputs, the second of which may get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
        return value, value.exp()


def test_what_a_step_takes_stands_beside_what_the_plan_promises() -> None:
    """The promise holds for a loss that reads all, which is measured alone; the one that is given reads one output."""
    value = torch.empty(8192, 256)
    found = estimate(
        Unread, value, H100, optimizer=torch.optim.SGD, loss=lambda outputs: outputs[0].mean(), fresh_grads=True
    )
    assert 0 < found.reserved.step_bytes < found.peak_bytes - 0.9 * value.nbytes
    assert "a step (predicted)" in " ".join(str(found).split())


def test_two_streams_have_pools_of_their_own() -> None:
    """What FSDP2 gathers, it gathers on a stream of its own."""
    one, other = (
        [event for key, stream in enumerate(streams) for event in (Allocate(key, 50 * MiB, stream), Free(key))]
        for streams in ((0, 0), (0, 1))
    )
    assert reservation_of(one, H100).reserved_bytes == 50 * MiB
    assert reservation_of(other, H100).reserved_bytes == 100 * MiB


def with_memory(size: int) -> Device:
    """A device whose allocator can have `size` bytes."""
    return replace(H100, name="a small one", memory_bytes=H100.context_bytes + size)


@cache
def report(size: int, **options: Any) -> Report:
    batch = torch.empty(16384, 256, device="meta")
    return estimate(
        layers, batch, with_memory(size), loss=torch.mean, optimizer=torch.optim.SGD, fresh_grads=True, **options
    )


@pytest.mark.slow
def test_the_default_limit_leaves_what_fragmentation_needs() -> None:
    default, given = report(700 * MiB), report(700 * MiB, mem_limit="90%")
    assert given.mem_limit == int(0.9 * 700 * MiB)
    assert given.peak_bytes <= given.mem_limit
    assert given.reserved.missing_bytes > 0
    assert default.reserved.missing_bytes == 0
    assert default.peak_bytes <= default.mem_limit < given.mem_limit
    assert default.reserved.reserved_bytes <= 700 * MiB
    assert default.overhead > given.overhead > 1


@pytest.mark.slow
def test_a_limit_of_the_users_is_kept_and_warned_of() -> None:
    found = report(700 * MiB, mem_limit="90%")
    warnings = [each for each in found.remarks() if each.startswith("Warning")]
    assert len(warnings) == 1
    assert "predicted to run out of memory although its tensors fit" in warnings[0]
    assert "expandable_segments:True, with which it fits" in warnings[0]
    assert "a small one has 734 MB" in warnings[0]
    roomy = report(2000 * MiB, mem_limit="90%")
    assert not [each for each in roomy.remarks() if "Warning" in each or "segments" in each]
    assert "reserved (predicted)" in str(roomy).replace("\N{NO-BREAK SPACE}", " ")


def test_what_fits_by_giving_segments_back_is_told_of() -> None:
    # Tensors of 100, 120, ... MiB, each of which needs a segment of its own.
    growing = [event for size in range(100, 200, 20) for event in (Allocate(size, size * MiB), Free(size))]
    found = reservation_of(growing, with_memory(250 * MiB))
    assert found.gives_back
    assert found.missing_bytes == 0
    warning = found.warning(180 * MiB)
    assert "takes time that is not counted" in warning
    plenty = reservation_of(growing, with_memory(800 * MiB))
    assert (plenty.reserved_bytes, plenty.gives_back, plenty.warning(180 * MiB)) == (700 * MiB, False, None)


def test_what_does_not_fit_says_how_large_a_device_would_have_to_be() -> None:
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
