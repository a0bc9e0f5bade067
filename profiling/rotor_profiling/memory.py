"""Measure the bytes that PyTorch's allocators hand out while code runs.

On CUDA, reads the allocator's counters. The CPU allocator has none, and the process's resident size says little about
tensors; but the profiler reports every CPU allocation and free, so their running sum is exact.
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
    """Bytes held at a phase's start, at most during it, and at its end, beyond those at the start of the meter."""

    start: int
    peak: int
    end: int

    @property
    def rise(self) -> int:
        """Most bytes held at once in the phase, beyond those at its start."""
        return self.peak - self.start

    @property
    def kept(self) -> int:
        """Bytes held at the end of the phase, beyond those at its start."""
        return self.end - self.start


class MemoryMeter(AbstractContextManager["MemoryMeter"], Protocol):
    """A context manager that measures the memory of named phases of the work inside it.

    `mark(name)` starts the phase `name`, up to the next mark or the end of the context. Work before the first mark is
    the phase `""`. `phases` is valid after the context exits.
    """

    @property
    def phases(self) -> dict[str, Phase]: ...

    def mark(self, name: str) -> None: ...


@dataclass(slots=True)
class CpuMeter:
    """Meter of CPU allocator events, collected by PyTorch's profiler.

    Ignores frees of blocks older than the meter, whose sizes the profiler does not know. Does not record operators,
    since recording a small operator takes longer than running it.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    # (Seconds since the first event, bytes held from then on relative to the meter's start)
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
        # The mark is an event among the allocations, so that one clock orders both.
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
            # Sorted by time, since the tree is in call order.
            events = sorted(_events(profile.kineto_results.experimental_event_tree()))
            changes = _changes(events)
            self.phases, held = split(changes), accumulate(change for _, change in changes)
            self.curve = [((event[0] - events[0][0]) / 1e9, each) for event, each in zip(events, held, strict=True)]


def _events(roots: Any) -> Iterator[tuple[int, str, int, int]]:
    """Yield (time in ns, mark or "", address, bytes) of every mark and every CPU allocation (+) or free (-)."""
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
    """Return (mark or "", bytes allocated (+) or freed (-)) of every event.

    Matches frees with allocations by address, so that frees of blocks from before the meter do not count. If a new
    block has the address of a live one, a thread whose events the profiler does not collect has freed the latter.
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
    """Return, by name, the phases of events (mark or "", change in bytes). The first, `""`, begins at `held` bytes."""
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
    # Keep the profiler's start and stop messages off stderr. Its C++ library bypasses `sys.stderr`, and reads
    # `KINETO_LOG_LEVEL` before any of our code runs. So redirect the file descriptor.
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
            self.mark("")  # ends the last phase; nothing reads the phase that this begins
