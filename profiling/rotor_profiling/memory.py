"""Measure the bytes that PyTorch's allocators allocate while code runs.

On CUDA, a meter reads the allocator's counters. The CPU's allocator has none, and the process's resident size says
little about tensors, so on the CPU a meter sums up the allocations and frees that PyTorch's profiler reports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch

from rotor_profiling import torch_compat

MARK = "rotor_profiling.mark:"  # Prefix of the names of profiler events that begin phases


@dataclass(frozen=True, slots=True)
class Phase:
    """Allocated bytes at a phase's start, peak and end. A meter subtracts the bytes at its own start from each."""

    start: int
    peak: int
    end: int

    @property
    def rise(self) -> int:
        """Peak bytes of the phase less the bytes at its start."""
        return self.peak - self.start

    @property
    def kept(self) -> int:
        """Bytes at the end of the phase less the bytes at its start."""
        return self.end - self.start


class MemoryMeter(AbstractContextManager["MemoryMeter"], Protocol):
    """A context manager that measures the memory of the code that runs inside it, in named phases.

    `mark(name)` begins the phase `name`, which ends at the next mark or when the context exits. Before the first mark,
    the phase is `""`. `phases` maps names to phases once the context has exited.
    """

    phases: dict[str, Phase]

    def mark(self, name: str) -> None: ...


@dataclass(slots=True)
class CpuMeter:
    """Meter of the CPU allocator's events, which PyTorch's profiler records.

    Ignores frees of blocks that were allocated before the meter started. Turns off the recording of operators, which
    takes longer than a small operator itself.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    # For each event: seconds since the first event, and allocated bytes right after it less those at the meter's start
    curve: list[tuple[float, int]] = field(default_factory=list)
    _profile: Any = None

    def __enter__(self) -> CpuMeter:
        # Not `torch.profiler.profile`, which parses every event when it stops, or warns that it does not keep events.
        self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        with _quiet():
            self._profile.__enter__()
        torch_compat.enable_record_function(False)  # thread-local switch without a public name
        return self

    def mark(self, name: str) -> None:
        # A mark is a profiler event, too, so one clock orders marks and allocations.
        torch_compat.enable_record_function(True)
        with torch.profiler.record_function(MARK + name):
            pass
        torch_compat.enable_record_function(False)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        torch_compat.enable_record_function(True)
        profile, self._profile = self._profile, None
        with _quiet():
            profile.__exit__(kind, error, trace)
        if error is None:
            events = sorted(_events(profile.kineto_results.experimental_event_tree()))
            changes = _changes(events)
            self.phases, held = split(changes), accumulate(change for _, change in changes)
            self.curve = [((event[0] - events[0][0]) / 1e9, each) for event, each in zip(events, held, strict=True)]


def _events(roots: Any) -> Iterator[tuple[int, str, int, int]]:
    """Yield (time in ns, name, 0, 0) of marks, and (time, "", address, bytes) of CPU allocations (+) and frees (-)."""
    pending = list(roots)
    while pending:
        event = pending.pop()
        if event.name == "[memory]":  # a leaf: skip the slow access to its (empty) children
            block = event.extra_fields
            if block.device.type == "cpu":
                yield event.start_time_ns, "", block.ptr, block.alloc_size
            continue
        pending.extend(event.children)
        if event.name.startswith(MARK):
            yield event.start_time_ns, event.name, 0, 0


def _changes(events: list[tuple[int, str, int, int]]) -> list[tuple[str, int]]:
    """Return, for every event, (name of the mark or "", change of the allocated bytes).

    Matches frees with allocations by address, so that frees of blocks from before the meter do not count. If a block is
    allocated at the address of a live one, counts the latter as freed, by a thread that the profiler does not record.
    """
    live: dict[int, int] = {}
    found = []
    for _, mark, address, size in events:
        change = -live.pop(address, 0)
        if size > 0:
            live[address] = size
            change += size
        found.append((mark, change))
    return found


def split(events: Iterable[tuple[str, int]], held: int = 0) -> dict[str, Phase]:
    """Map names to phases, given (name of a mark or "", change in bytes) per event, and `held` bytes at the start."""
    phases: dict[str, Phase] = {}
    name, start, peak = "", held, held
    for mark, change in events:
        if mark:
            phases[name] = Phase(start, peak, held)
            name, start, peak = mark.removeprefix(MARK), held, held
        held += change
        peak = max(peak, held)
    phases[name] = Phase(start, peak, held)
    return phases


@contextmanager
def _quiet() -> Iterator[None]:
    # Hide the messages that the profiler prints when it starts and stops. Its C++ library bypasses `sys.stderr`, and
    # reads `KINETO_LOG_LEVEL` before this code runs. So redirect the file descriptor.
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


@dataclass(slots=True)
class CudaMeter:
    """Meter that reads the CUDA caching allocator's counters, which count blocks (multiples of 512 bytes)."""

    device: torch.device
    phases: dict[str, Phase] = field(default_factory=dict)
    _origin: int = 0
    _name: str = ""
    _start: int = 0

    def __enter__(self) -> CudaMeter:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._origin = torch.cuda.memory_allocated(self.device)
        return self

    def mark(self, name: str) -> None:
        held = torch.cuda.memory_allocated(self.device) - self._origin
        peak = torch.cuda.max_memory_allocated(self.device) - self._origin
        self.phases[self._name] = Phase(self._start, peak, held)
        self._name, self._start = name, held
        torch.cuda.reset_peak_memory_stats(self.device)  # so that the next peak belongs to the new phase

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.mark("")  # ends the last phase
