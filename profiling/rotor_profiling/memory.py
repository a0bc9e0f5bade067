"""Bytes that PyTorch's allocators hand out while a piece of code runs.

On CUDA the allocator's own counters are read. The CPU allocator keeps none, and the resident size of the process says
little about tensors; but the profiler reports every allocation and every free of the CPU allocator, so that their
running sum is exact.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch

from rotor_profiling import torch_compat
from rotor_profiling.timing import Stopwatch

_MARK = "rotor_profiling.mark:"
_HOLD = "rotor_profiling.hold:"


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory of one phase in bytes, relative to the moment when the meter started."""

    start: int
    peak: int
    end: int
    peak_with_held: int | None = field(default=None, compare=False)
    """The peak if nothing had been freed that somebody has asked to `hold`; None where single frees do not show."""

    @property
    def rise(self) -> int:
        """The most that was held at once, beyond what was held when the phase started."""
        return self.peak - self.start

    @property
    def kept(self) -> int:
        """What is still held at the end of the phase, beyond what was held at its start."""
        return self.end - self.start


class MemoryMeter(Protocol):
    """A context manager that splits what runs inside it into named phases.

    `mark(name)` starts the phase `name`; it lasts until the next mark or the end of the context. `phases` can be read
    once the context has been left. Work before the first mark belongs to the phase `""`. The storage of a tensor that
    was made inside counts for `Phase.peak_with_held` after `hold(tensor)`, as if it was there for good.
    """

    @property
    def phases(self) -> dict[str, Phase]: ...

    def mark(self, name: str) -> None: ...

    def hold(self, tensor: torch.Tensor) -> None: ...

    def __enter__(self) -> MemoryMeter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(slots=True)
class CpuMeter:
    """Allocator events of the CPU, collected by the profiler of PyTorch.

    Frees of blocks that are older than the meter are not counted: the profiler does not know their sizes. Of operators
    it records nothing: with small ones, that would take longer than they do.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    curve: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the first event, and the bytes held from then on, relative to the moment when the meter started."""
    _profile: Any = None

    def __enter__(self) -> CpuMeter:
        # Not torch.profiler.profile: it parses every event when it stops, or warns that it does not keep them.
        self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        with _quiet():
            self._profile.__enter__()
        _record_operators(False)
        return self

    def mark(self, name: str) -> None:
        _record(_MARK + name)

    def hold(self, tensor: torch.Tensor) -> None:
        _record(f"{_HOLD}{tensor.untyped_storage().data_ptr()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _record_operators(True)
        profile, self._profile = self._profile, None
        with _quiet():
            profile.__exit__(kind, error, trace)
        if error is None:
            # The tree is in the order of who called whom, not of time.
            events = sorted(_events(profile.kineto_results.experimental_event_tree()))
            self.phases, self.curve = _split(events)


def _record(name: str) -> None:
    # An event among the allocations, so that one clock orders both.
    _record_operators(True)
    with torch.profiler.record_function(name):
        pass
    _record_operators(False)


def _record_operators(enabled: bool) -> None:
    """Whether profilers see the operators that this thread runs, as they do by default."""
    torch_compat.enable_record_function(enabled)  # a switch of this thread, for which torch has no public name


def _events(roots: Any) -> Iterator[tuple[int, str, int, int]]:
    """(time in ns, mark or "", address, bytes) of every mark and every CPU allocation (+) or free (-); of what is held
    from then on, without a mark and with 0 bytes.
    """
    pending = list(roots)
    while pending:
        event = pending.pop()
        name = event.name
        if name == "[memory]":  # nothing happens inside of it; to ask for its children takes longest of all
            block = event.extra_fields
            if block.device.type == "cpu":
                yield event.start_time_ns, "", block.ptr, block.alloc_size
            continue
        pending.extend(event.children)
        if name.startswith(_MARK):
            yield event.start_time_ns, name, 0, 0
        elif name.startswith(_HOLD):
            yield event.start_time_ns, "", int(name.removeprefix(_HOLD)), 0


def _split(events: list[tuple[int, str, int, int]]) -> tuple[dict[str, Phase], list[tuple[float, int]]]:
    phases: dict[str, Phase] = {}
    curve: list[tuple[float, int]] = []
    live: dict[int, int] = {}
    name, start, peak, held = "", 0, 0, 0  # before the first mark
    to_hold: set[int] = set()
    gone, with_held = 0, 0  # bytes that should be there and are not, and the peak if they were
    for time, mark, address, size in events:
        if mark:
            phases[name] = Phase(start, peak, held, with_held)
            name, start, peak, with_held = mark.removeprefix(_MARK), held, held, held + gone
        elif not size:
            if address in live:
                to_hold.add(address)
        else:
            # By address, not by the size of the free: a block that an earlier meter saw allocated is reported as well.
            # What an allocation finds at its address has been freed, by a thread whose events are not collected.
            freed = live.pop(address, 0)
            held -= freed
            if address in to_hold:
                to_hold.remove(address)
                gone += freed
            if size > 0:
                held += size
                live[address] = size
                if held > peak:
                    peak = held
        if held + gone > with_held:
            with_held = held + gone
        curve.append(((time - events[0][0]) / 1e9, held))
    phases[name] = Phase(start, peak, held, with_held)
    return phases, curve


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log lines that the profiler writes when it starts and stops off stderr.

    Its C++ library writes them past `sys.stderr`, and reads `KINETO_LOG_LEVEL` before any code of ours runs. So the
    file descriptor itself points elsewhere for the moment.
    """
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
    """Counters of the CUDA caching allocator; sizes are those of its blocks (multiples of 512 bytes)."""

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
        torch.cuda.reset_peak_memory_stats(self.device)  # to what is held now, so the next peak is that of its phase

    def hold(self, tensor: torch.Tensor) -> None:
        """Counters do not tell when a single tensor is freed."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.mark("")  # ends the last phase; the one that it begins is never read


class ClockedMeter:
    """`meter`, with the `seconds` of its phases by a `watch`, without those in which it marks them.

    Phases of one name add up. The phase that the end of the context ends has none, and without a watch, none has any.
    """

    def __init__(self, meter: MemoryMeter, watch: Stopwatch | None) -> None:
        self._meter, self._watch = meter, watch
        self._names = [""]
        self.seconds: dict[str, float] = {}

    @property
    def phases(self) -> dict[str, Phase]:
        """Those of the meter."""
        return self._meter.phases

    def mark(self, name: str) -> None:
        """Begin the phase `name`."""
        with self._uncounted(name):
            self._meter.mark(name)

    def hold(self, tensor: torch.Tensor) -> None:
        """As the meter does."""
        with self._uncounted(self._names[-1]):
            self._meter.hold(tensor)

    @contextmanager
    def _uncounted(self, then: str) -> Iterator[None]:
        """What happens in here takes no time; `then` is the phase that goes on, or begins."""
        if self._watch is not None:
            self._watch.lap()
        yield
        if self._watch is not None:
            self._watch.lap()
            self._names.append(then)

    def __enter__(self) -> ClockedMeter:
        self._meter.__enter__()
        if self._watch is not None:
            self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            laps = self._watch.stop()[::2]  # every other one does not count
            for name, seconds in zip(self._names, laps, strict=False):
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._meter.__exit__(kind, error, trace)
