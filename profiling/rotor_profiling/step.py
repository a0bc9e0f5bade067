"""Measure the memory of a training step, which a function runs or which is part of the user's training loop.

A function runs inside a meter, a context manager (`memory.py`). A step of the user's loop cannot run inside one, since
the user's code computes the loss and calls `backward`. So the planned model's forward starts a watch, and later calls
from the model and from autograd begin the watch's phases and stop it.

# Note [Watching the CPU's allocator while the user's code runs]
#
# On CUDA, a watch reads the allocator's counters. The CPU's allocator has none, but reports each allocation and free to
# the profiler of the thread. So on the CPU, a watch keeps a profiler running while the user's code runs.
#
#  1. A watch uses PyTorch's legacy profiler, which records only the thread that starts it, and changes no operator,
#     dispatch mode or compiled function. It delays each operator by some 20 µs. The newer profiler, which the meters
#     use, crashes with a segmentation fault if a second session starts in another thread.
#  2. A thread can run one profiler at a time. So a watch does not start while a profiler runs. If a meter or the user
#     is about to start a profiler, the watch gives way: it stops and reports nothing.
#  3. A watch must stop in the thread in which it started, and not inside autograd's engine: the engine restores the
#     thread's profiler after every node, so it would turn the stopped profiler on again. A watch that is asked to stop
#     there, as in a forward that `torch.utils.checkpoint` recomputes, stops after the backward and reports nothing.
#  4. PyTorch reports the free of a block from before the watch only if an earlier profiler recorded an allocation at
#     its address. If `present_bytes` includes the block and its free is not reported, later sums are too large; if
#     `present_bytes` lacks the block and its free is reported, later sums are too small.
#  5. A thread of the process group's backend may be the last to release a tensor that processes exchange, and the
#     profiler misses that free. So with several processes, no watch starts, and `measure_ways` measures repeatedly.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from rotor_profiling import torch_compat
from rotor_profiling.backends import memory_meter
from rotor_profiling.memory import MARK, Phase, split
from rotor_profiling.storage import storage_bytes
from rotor_profiling.timing import several_processes
from rotor_solver.described_error import InvalidStateError


def measured_peak(step: Callable[[], object], present: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the largest number of bytes allocated on `device` at any moment while `step` runs.

    On CUDA, counts all tensors of the process. On the CPU, which has no such counter, counts the tensors `present`
    (parameters, buffers, gradients, optimizer state, the batch), and those that `step` allocates.
    Raises ValueError for a device type whose allocator cannot be read.
    """
    return measured_phases(lambda mark: step(), present, device)[""].peak


def measured_phases(
    step: Callable[[Callable[[str], None]], object], present: Iterable[torch.Tensor], device: torch.device
) -> dict[str, Phase]:
    """Return the `Phase` of each phase name of `step`: bytes allocated on `device`, counted as in `measured_peak`.

    `step` gets a function of a name, which ends the current phase and begins one of that name; the first is named "".
    Raises ValueError for a device type whose allocator cannot be read.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
    else:
        before = storage_bytes(tensor for tensor in present if tensor.device == device)
    with memory_meter(device) as meter:
        step(meter.mark)
    return {
        name: Phase(before + phase.start, before + phase.peak, before + phase.end)
        for name, phase in meter.phases.items()
    }


def watch_step(device: torch.device, present_bytes: int, limit_bytes: int) -> StepWatch | None:
    """Watch allocations on `device` from now on, and return the watch; None if it cannot start (Rules 2, 3 and 5).

    `present_bytes`: bytes allocated before, to which a CPU watch adds; unused on CUDA. There, torch counts the peak
    since its last reset, so a phase's peak is exact if it exceeds all earlier peaks. Otherwise, the phase reports the
    larger of its bytes at start and end. The counter is reset only if it exceeds `limit_bytes` now: it would hide that
    this step exceeds the limit, too.

    `mark(name)` begins a phase; the first phase is `""`. `stop()` ends the last phase and returns each `Phase` by name,
    in bytes of the whole device; None if the watch gave way (Rule 2) or was stopped before.
    """
    if device.type == "cuda":
        return CudaWatch(device, limit_bytes)
    if device.type != "cpu" or several_processes():  # Rule 5
        return None
    # Private functions of torch. If a release lacks one, no watch starts.
    functions = (torch.autograd, "_enable_profiler_legacy"), (torch.autograd, "_disable_profiler_legacy")
    if not all(hasattr(*each) for each in (*functions, (torch.autograd.profiler, "_run_on_profiler_start"))):
        return None
    # Inside a backward, a recomputation may run a forward, but a watch could not stop there (Rule 3).
    if torch_compat.profiler_enabled() or _in_engine():
        return None
    _have_profilers_announced()
    return CpuWatch(present_bytes)


class CpuWatch:
    def __init__(self, present_bytes: int) -> None:
        self._present_bytes = present_bytes
        self._listens, self._complete = True, True
        # Like `torch.autograd.profiler_legacy`, without its deprecation warning and its parsing of all events.
        kinds: Any = torch.autograd
        shapes, memory, stack, flops, modules = False, True, False, False, False
        experimental = torch_compat.ExperimentalConfig()
        torch_compat.enable_profiler_legacy(
            kinds.ProfilerConfig(kinds.ProfilerState.CPU, shapes, memory, stack, flops, modules, experimental)
        )
        _in_thread.watch = self

    def mark(self, name: str) -> None:
        if self._in_its_thread():
            # A mark is a profiler event, too, so the order of events tells the phase of each allocation.
            with torch.autograd.profiler.record_function(MARK + name):
                pass

    def stop(self) -> dict[str, Phase] | None:
        # In another thread, do nothing: the profiler runs until its own thread stops it or starts another (Rule 3).
        if not self._in_its_thread():
            return None
        if _in_engine():
            self._complete = False

            def callback() -> None:
                """Do nothing: only the backward pass refers to this function, which is finalized when that is freed."""

            weakref.finalize(callback, self.stop).atexit = False
            torch_compat.queue_callback(callback)
            return None
        self._listens, _in_thread.watch = False, None
        phases = split(_events(torch_compat.disable_profiler_legacy()), self._present_bytes)
        return phases if self._complete else None

    def _in_its_thread(self) -> bool:
        # Does not compare thread ids: the system reuses the id of an ended thread.
        return self._listens and getattr(_in_thread, "watch", None) is self

    def give_way(self) -> None:
        """Stop, since another profiler is about to start; inside a backward, where this fails, raise RuntimeError."""
        self.stop()
        if self._listens and torch_compat.profiler_enabled() and _in_engine():
            raise InvalidStateError(
                "start the profiler before the step, or pass watch=False to Checkpointable, which watches backwards; "
                "if a model in torch.utils.checkpoint(use_reentrant=True) is planned here, call its measure() before",
                kind="profiler_in_backward",
            )


# Its attribute `watch` is the running watch of the thread, if any.
_in_thread = threading.local()


def give_way() -> None:
    """Stop the watch of this thread, if there is one."""
    if (watch := getattr(_in_thread, "watch", None)) is not None:
        watch.give_way()


@functools.cache
def _have_profilers_announced() -> None:
    """Patch torch so that the thread's watch stops before a profiler starts (Rule 2), and in forked processes."""
    # Every profiler calls this torch function right before it starts, and fails if the legacy profiler is still on.
    profiler: Any = torch.autograd.profiler
    started = profiler._run_on_profiler_start

    @functools.wraps(started)
    def announced() -> None:
        give_way()
        started()

    profiler._run_on_profiler_start = announced
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=give_way)


def _in_engine() -> bool:
    return torch_compat.current_graph_task_id() != -1


def _events(threads: list[list[Any]]) -> Iterator[tuple[str, int]]:
    """Yield (name, 0) for every mark, and ("", bytes) for every allocation (+) and free (-)."""
    # One list of events per thread. Their order in time is unknown across threads, so the lists follow one another.
    for event in chain.from_iterable(threads):
        if event.kind() == "memory_alloc":
            yield "", event.cpu_memory_usage()
        elif event.kind() == "push" and event.name().startswith(MARK):
            yield event.name(), 0


class CudaWatch:
    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._device = device
        self._phases: dict[str, Phase] | None = {}
        self._name = ""
        held, peak = _counters(device)
        if peak > limit_bytes:
            torch.cuda.reset_peak_memory_stats(device)
            peak = held
        self._held, self._peak = held, peak

    def mark(self, name: str) -> None:
        if self._phases is None:
            return
        held, peak = _counters(self._device)
        reached = peak if peak > self._peak else max(self._held, held)
        self._phases[self._name] = Phase(self._held, reached, held)
        self._name, self._held, self._peak = name, held, peak

    def stop(self) -> dict[str, Phase] | None:
        self.mark("")
        phases, self._phases = self._phases, None
        return phases


StepWatch = CpuWatch | CudaWatch  # returned by `watch_step`


def _counters(device: torch.device) -> tuple[int, int]:
    found = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return found["current"], found["peak"]
