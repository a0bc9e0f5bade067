"""Measure the memory of a training step: its peak, or the phases of a step that runs in the caller's own code.

A meter (`memory.py`) encloses the measured code. A step in the caller's own code cannot be enclosed: between the
planned model's forward and the end of the backward, the caller's loss runs. So a watch starts, marks phases and stops
wherever the planned model gets control.

# Note [Listening to the CPU's allocator while the caller's code runs]
#
# On CUDA a watch reads counters. The CPU allocator has none, but reports to the thread's profiler. So a watch keeps a
# profiler on while the caller's code runs.
#
#  1. A watch uses PyTorch's legacy profiler, which is local to the thread that starts it, and leaves operators,
#     dispatch modes and compiled functions as they are. It delays each operator by some 20 µs. The newer profiler,
#     which the meters use, crashes with a segmentation fault if a second session starts in another thread.
#  2. A thread has one profiler. If one is running already, no watch starts. If another profiler is about to start (one
#     of our meters, or the user's own), the watch gives way: it stops and reports nothing.
#  3. A watch must stop in the thread in which it started, and not inside autograd's engine: the engine restores the
#     thread's profiler after every node, so it would turn the stopped profiler on again. A watch that is asked to stop
#     there, as in a forward that `torch.utils.checkpoint` recomputes, stops after the backward and reports nothing.
#  4. A free event has a size but no address. If the block is older than the watch, its free counts only if an earlier
#     profiler saw a block at that address. So blocks in `present_bytes` must come from an earlier watch, or must not be
#     freed. Each counted free of an older block outside of `present_bytes` makes later sums too small.
#  5. If a thread of the process group's backend is the last to hold memory that processes send to each other, the
#     profiler misses its free. So with several processes, no watch starts, and `measure_ways` measures stages again.
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
    """Return the most bytes that `device` holds while `step` runs.

    On CUDA, counts everything that the process has allocated. The CPU has no such count: there, adds the bytes of the
    tensors `present` (parameters, buffers, gradients, optimizer state, the batch) and the bytes that `step` allocates.
    Raises ValueError for a device type whose allocator cannot be read.
    """
    return measured_phases(lambda mark: step(), present, device)[""].peak


def measured_phases(
    step: Callable[[Callable[[str], None]], object], present: Iterable[torch.Tensor], device: torch.device
) -> dict[str, Phase]:
    """Return the bytes that `device` holds in each phase of `step`, counted as in `measured_peak`.

    `step` gets a function that begins a named phase and ends the previous one; the first phase is named "". Raises
    ValueError for a device type whose allocator cannot be read.
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

    `present_bytes` are in memory already (ignored on CUDA). On CUDA, a phase's peak is exact if it exceeds all earlier
    peaks. Otherwise the phase reports the larger of its bytes at start and end, which may be less than its peak. If an
    earlier peak exceeds `limit_bytes`, it would hide a step that does so too, so torch's peak counter is reset.

    `mark(name)` begins a phase; the first phase is `""`. `stop()` ends the last phase and returns all phases in bytes
    of the whole device, or None if the watch had to give way or was stopped before.
    """
    if device.type == "cuda":
        return CudaWatch(device, limit_bytes)
    if device.type != "cpu" or not _can_listen():
        return None
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
            # The mark is an event among the allocations, so that both have one order.
            with torch.autograd.profiler.record_function(MARK + name):
                pass

    def stop(self) -> dict[str, Phase] | None:
        # In another thread, does nothing: the profiler runs on until its own thread starts a watch or meter (Rule 3).
        if not self._in_its_thread():
            return None
        if _in_engine():
            self._complete = False
            _when_pass_is_freed(self.stop)
            return None
        self._listens, _in_thread.watch = False, None
        phases = split(_events(torch_compat.disable_profiler_legacy()), self._present_bytes)
        return phases if self._complete else None

    def _in_its_thread(self) -> bool:
        # Does not compare thread ids: the system reuses the id of an ended thread.
        return self._listens and getattr(_in_thread, "watch", None) is self

    def give_way(self) -> None:
        """Stop because another profiler is about to start. Raises RuntimeError inside a backward."""
        self.stop()
        if self._listens and torch_compat.profiler_enabled() and _in_engine():
            raise InvalidStateError(
                "this backward is watched: start the profiler before the step, or pass watch=False to Checkpointable; "
                "for a model planned here, in a reentrant region of torch.utils.checkpoint, call its measure() before",
                kind="profiler_in_backward",
            )


# Its attribute `watch` is the running watch of the thread, if any.
_in_thread = threading.local()


def give_way() -> None:
    """Stop the watch of this thread, if there is one."""
    if (watch := getattr(_in_thread, "watch", None)) is not None:
        watch.give_way()


def _can_listen() -> bool:
    if several_processes():  # Rule 5
        return False
    # Private functions of torch. If a release lacks one, no watch starts.
    functions = (torch.autograd, "_enable_profiler_legacy"), (torch.autograd, "_disable_profiler_legacy")
    if not all(hasattr(*each) for each in (*functions, (torch.autograd.profiler, "_run_on_profiler_start"))):
        return False
    # Not inside a backward, where a recomputation runs forwards (Rule 3).
    if torch_compat.profiler_enabled() or _in_engine():
        return False
    _have_profilers_announced()
    return True


@functools.cache
def _have_profilers_announced() -> None:
    """From now on, stop the thread's watch before any profiler starts (Rule 2), and in forked processes."""
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


def _when_pass_is_freed(do: Callable[[], object]) -> None:
    """Call `do` when the engine has released the current backward pass and returns to its caller."""

    def callback() -> None:
        """Do nothing: only the pass holds this function, which is therefore freed when the pass is."""

    weakref.finalize(callback, do).atexit = False
    torch_compat.queue_callback(callback)


def _events(threads: list[list[Any]]) -> Iterator[tuple[str, int]]:
    """Yield (mark or "", bytes allocated (+) or freed (-)) of every mark, allocation and free, of all threads."""
    # Usually one list. Those of further threads that autograd used come after it, since threads share no clock.
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


StepWatch = CpuWatch | CudaWatch  # A running watch, see `watch_step`


def _counters(device: torch.device) -> tuple[int, int]:
    found = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return found["current"], found["peak"]
