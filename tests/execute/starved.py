"""Devices that run out of memory when told to, and steps on them, compared with plain training in every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling import tensors_in
from rotor_py import Checkpointable
from rotor_py.stage.error_context import watched
from tests.checkpointable.steps import planned_at, square
from tests.training.loop import differences, rows
from tests.training.tripping import left_behind


def out_of_memory(asked: int = 1024) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked / 2**20:.2f} MiB. GPU 0 has")


def out_of_cpu_memory(asked: int = 1024) -> RuntimeError:
    text = f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {asked} bytes. Error code 12"
    return RuntimeError(f"[enforce fail at alloc_cpu.cpp:117] err == 0. {text} (Cannot allocate memory)")


class Capacity(TorchDispatchMode):
    """A device of `size` bytes for what operators make inside the mode, as far as operators return it.

    `peak` is the most that was there at once, `errors` counts what was refused.
    """

    def __init__(self, size: float = float("inf")) -> None:
        super().__init__()
        self.size = size
        self.peak = self.errors = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def held(self) -> int:
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tensors_in([args, kwargs or {}])}
        made = function(*args, **(kwargs or {}))
        storages = [each.untyped_storage() for each in tensors_in(made)]
        new = {each._cdata: (StorageWeakRef(each), each.nbytes()) for each in storages if each._cdata not in given}
        del storages
        held = self.held
        asked = sum(size for key, (_, size) in new.items() if key not in self._live)
        if held + asked > self.size:
            self.errors += 1
            raise out_of_memory(asked)
        self._live.update(new)
        self.peak = max(self.peak, held + asked)
        return made


class AtOperators(TorchDispatchMode):
    """Runs out of memory, or is interrupted, right after the operators with these numbers."""

    def __init__(self, *at: int, error: Callable[[], BaseException] = out_of_memory) -> None:
        super().__init__()
        self.at, self.calls, self.errors, self._error = at, 0, 0, error

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.calls += 1
        if self.calls in self.at:
            self.errors += 1
            raise self._error()
        return made

    @contextmanager
    def inside_stages(self) -> Iterator[AtOperators]:
        """The mode, on from where a stage begins to where it ends: TorchDynamo captures nothing inside of a mode."""
        with watched(lambda doing, name, begins: self.turn(begins)):
            yield self

    def turn(self, on: bool) -> None:
        if on:
            self.__enter__()
        else:
            self.__exit__(None, None, None)


F = nn.functional
Train = Callable[[nn.Module], Any]


class Gated(nn.Module):
    """Captured, with stages that are stored in part, dropout and a batch norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.entry, self.norm = nn.Linear(12, width), nn.BatchNorm1d(width)
        self.gates = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.outs = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.norm(self.entry(value))
        for gate, out in zip(self.gates, self.outs, strict=True):
            value = value + F.dropout(out(F.silu(gate(value)) * torch.tanh(gate(value))), 0.2, self.training)
        return value


class Moving(nn.Module):
    """Its output depends on a buffer that it changes, and of which it has a new one now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.replaced = nn.Linear(32, 32), nn.Buffer(torch.zeros(32)), nn.Buffer(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.layer(value)
        self.seen.add_(value.detach().mean(0))
        self.replaced = self.replaced * 2
        return torch.tanh(value + self.seen) * self.replaced.log()


def moving() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 32), Moving(), nn.Dropout(0.2), Moving(), nn.GELU(), Moving())


def planned(model: nn.Module, share: float = 1.0, **given: Any) -> Checkpointable:
    return planned_at(share, copy.deepcopy(model), rows(), on_oom="replan", **given)


def step(network: nn.Module, seed: int = 3, batch: torch.Tensor | None = None) -> None:
    torch.manual_seed(seed)
    square(network(rows() if batch is None else batch)).backward()


def state(network: nn.Module) -> dict[str, Any]:
    gradients = {f"gradient of {name}": copy.deepcopy(p.grad) for name, p in network.named_parameters()}
    return {**gradients, **left_behind(network)}


def assert_exact_wherever_it_runs_out(network, start, train: Train = step, points=3, times=1, sequence=None) -> None:
    """Out of memory at `points` operators all over a step, `times` in a row: everything is as in plain training."""
    limit = network.mem_limit

    def begin() -> None:
        network.zero_grad()
        network.load_state_dict(start.state_dict())
        network.compute_sequence(limit)
        network.sequence = sequence or network.sequence

    begin()
    train(network)  # which buffers move is known from here on
    begin()
    plain = copy.deepcopy(start)
    train(plain)
    expected = state(plain)
    with AtOperators().inside_stages() as count:
        train(network)
    assert not differences(state(network), expected)
    assert count.calls > 30
    for at in range(1 + count.calls // (2 * points), count.calls + 1, count.calls // points):
        begin()
        with AtOperators(*range(at, at + 3 * times, 3)).inside_stages() as mode:
            train(network)
        assert mode.errors == times or at + 3 * times > count.calls
        assert not differences(state(network), expected), at


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)
