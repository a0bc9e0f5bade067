"""Bytes of a training step: its peak, and those of one that runs in the caller's own code, phase by phase.

A meter (`memory.py`) encloses what it measures. A step cannot be enclosed: between our forward and the end of the
backward, a loss runs that nobody passed in. So a watch is started, marked and stopped from wherever control comes by.

# Note [Listening to the CPU's allocator while the caller's code runs]
#
# On CUDA a watch reads counters. The CPU's allocator has none: it reports to the profiler of the
# thread. That profiler stays on in code that is not ours, so it must not stand in anybody's way.
#
#  1. It is PyTorch's older profiler. The newer one, which the meters use, has one session for the whole process: a
#     second one in another thread ends in a segmentation fault. The older one belongs to its thread, and changes
#     nothing of what runs: no operator, no mode, no compiled function. An operator takes some 20 µs longer.
#  2. A thread has one profiler. If there is one already, nothing is watched. If another is about to start, a meter of
#     ours or the user's own, the watch gives way, and has seen nothing.
#  3. It is stopped where it was started: in the same thread, and not inside of autograd's engine, which puts the
#     profiler of the thread back after every node, and forgets that it was stopped: what listens would never go, and
#     take the next profiler's memory for its own. A watch that is to stop in there, as in a forward that
#     `torch.utils.checkpoint` recomputes, has seen nothing, and ends with the engine's pass.
#  4. A free has a size and no address, so that of a block which is older counts as any other, if it is reported: where
#     an earlier profiler saw a block at that address. If such a block is in `present_bytes`, it has to come from an
#     earlier watch, or it must not be freed. Of others that are freed, the sums are too small from then on.
#  5. What processes send to each other is freed by whoever lets go of it last. If that is a thread of the backend, the
#     profiler does not see it, and a step would show more than it takes. So where there are several processes, nothing
#     is watched. (Stages are measured several times instead, and the least counts: see `stage/measured_ways.py`.)
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from rotor_profiling import torch_compat
from rotor_profiling.backends import memory_meter
from rotor_profiling.memory import CpuMeter, Phase
from rotor_profiling.storage import storage_bytes
from rotor_profiling.timing import several_processes
from rotor_solver.errors import InvalidStateError


def measured_peak(step: Callable[[], object], present: Iterable[torch.Tensor], device: torch.device) -> int:
    """The most bytes that `device` holds while `step` runs.

    On CUDA, that is all that the process has allocated. On the CPU, nobody counts what is already there; so it is the
    bytes of the tensors `present` (parameters, buffers, gradients, optimizer state, the batch) and what `step` adds.
    ValueError for a kind of device whose allocator cannot be read.
    """
    return measured_phases(lambda mark: step(), present, device)[""].peak


def measured_phases(
    step: Callable[[Callable[[str], None]], object], present: Iterable[torch.Tensor], device: torch.device
) -> dict[str, Phase]:
    """The bytes that `device` holds in each phase of `step`, counted as `measured_peak` counts.

    `step` gets a function that begins the phase of a given name and ends the one before; the first phase is named "".
    ValueError for a kind of device whose allocator cannot be read.
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


def measured_curve(step: Callable[[], object], present: Iterable[torch.Tensor]) -> list[tuple[float, int]]:
    """The bytes that the CPU holds while `step` runs: (seconds since its first allocation, bytes from then on).

    Counted as `measured_peak` counts, which is the curve's highest point. The profiler that listens makes the step a
    little slower.
    """
    before = storage_bytes(tensor for tensor in present if tensor.device.type == "cpu")
    with CpuMeter() as meter:  # CUDA's allocator has counters, but tells no history
        step()
    return [(seconds, before + held) for seconds, held in meter.curve]


_MARK = "rotor_profiling.watch:"


class StepWatch(Protocol):
    """A watch that runs. What comes before the first mark is the phase `""`."""

    def mark(self, name: str) -> None:
        """Begin the phase `name`."""

    def stop(self) -> dict[str, Phase] | None:
        """End the last phase. All phases in bytes of the whole device; None if the watch had to give way.

        Stopped twice, it has nothing to say the second time.
        """


def watch_step(device: torch.device, present_bytes: int, limit_bytes: int) -> StepWatch | None:
    """Watch what is allocated on `device` from now on; None if that cannot be done now.

    `present_bytes` is what is there already; on CUDA it is not needed. A peak there is exact if it is higher than all
    that were before. Else it is what was held at the phase's ends, which is less than the truth, and no more than the
    highest peak before. If that was above `limit_bytes`, it would hide what is to be seen, and is reset.
    """
    if device.type == "cuda":
        return _CudaWatch(device, limit_bytes)
    if device.type != "cpu" or not _can_listen():
        return None
    return _CpuWatch(present_bytes)


class _CpuWatch:
    def __init__(self, present_bytes: int) -> None:
        self._present_bytes = present_bytes
        self._thread = threading.get_ident()
        self._listens, self._complete = True, True
        _enable(_config())
        _in_thread.watch = self

    def mark(self, name: str) -> None:
        if self._listens and threading.get_ident() == self._thread:
            # An event among the allocations, so that they are in one order.
            with torch.autograd.profiler.record_function(_MARK + name):
                pass

    def stop(self) -> dict[str, Phase] | None:
        # In another thread, the profiler goes on until its own comes by, at the next watch or meter (Rule 3).
        if not self._listens or threading.get_ident() != self._thread:
            return None
        if _in_engine():
            self._complete = False
            _when_pass_is_freed(self.stop)
            return None
        self._listens, _in_thread.watch = False, None
        phases = _split(_disable(), self._present_bytes)
        return phases if self._complete else None

    def give_way(self) -> None:
        """Stop, for another profiler is about to start. RuntimeError if that cannot be done now."""
        self.stop()
        if self._listens and _is_on() and _in_engine():
            raise InvalidStateError(
                "a profiler cannot start inside of this backward, since the training step is watched, as the first one "
                "of a plan is; start it before the step, or pass watch=False to Checkpointable. If it is a model that "
                "is to be planned here, in a reentrant region of torch.utils.checkpoint, call its measure() before.",
                kind="profiler_in_backward",
            )


class _InThread(threading.local):
    watch: _CpuWatch | None = None


_in_thread = _InThread()


def give_way() -> None:
    """Stop the watch of this thread, if there is one."""
    if _in_thread.watch is not None:
        _in_thread.watch.give_way()


def _can_listen() -> bool:
    if several_processes():  # Rule 5
        return False
    # Private functions of torch. Where they are missing, nothing is watched.
    functions = (torch.autograd, "_enable_profiler_legacy"), (torch.autograd, "_disable_profiler_legacy")
    if not all(hasattr(*each) for each in (*functions, (torch.autograd.profiler, "_run_on_profiler_start"))):
        return False
    # Not inside of a backward (Rule 3): there, a forward runs as a recomputation.
    if _is_on() or _in_engine():
        return False
    _have_profilers_announced()
    return True


@functools.cache
def _have_profilers_announced() -> None:
    """Give way to any profiler that starts from now on (Rule 2), and in processes that are forked."""
    # Each calls this function of torch right before it starts. If the older one was still on, it would raise an error.
    profiler: Any = torch.autograd.profiler
    started = profiler._run_on_profiler_start

    @functools.wraps(started)
    def announced() -> None:
        give_way()
        started()

    profiler._run_on_profiler_start = announced
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=give_way)


def _is_on() -> bool:
    """Whether this thread has a profiler."""
    return bool(torch_compat.profiler_enabled())


def _in_engine() -> bool:
    return torch_compat.current_graph_task_id() != -1


def _when_pass_is_freed(do: Callable[[], object]) -> None:
    """Call `do` when the engine has let go of the pass that it works at, and returns to its caller."""

    def hold(token: object) -> None:
        """The pass owns its callbacks, and this one the token."""

    token = _Token()
    weakref.finalize(token, do).atexit = False
    torch_compat.queue_callback(functools.partial(hold, token))


class _Token:
    __slots__ = ("__weakref__",)


def _config() -> Any:
    """As `torch.autograd.profiler_legacy` has it, which warns that it is old and parses all events when it stops."""
    kinds: Any = torch.autograd
    shapes, memory, stack, flops, modules = False, True, False, False, False
    experimental = torch_compat.ExperimentalConfig()
    return kinds.ProfilerConfig(kinds.ProfilerState.CPU, shapes, memory, stack, flops, modules, experimental)


def _enable(config: Any) -> None:
    torch_compat.enable_profiler_legacy(config)


def _disable() -> list[list[Any]]:
    """The events of all threads that worked for this one."""
    found: list[list[Any]] = torch_compat.disable_profiler_legacy()
    return found


def _split(threads: list[list[Any]], present_bytes: int) -> dict[str, Phase]:
    phases: dict[str, Phase] = {}
    name, start, peak, held = "", present_bytes, present_bytes, present_bytes
    for mark, size in _events(threads):
        if mark:
            phases[name] = Phase(start, peak, held)
            name, start, peak = mark.removeprefix(_MARK), held, held
        held += size
        peak = max(peak, held)
    phases[name] = Phase(start, peak, held)
    return phases


def _events(threads: list[list[Any]]) -> Iterator[tuple[str, int]]:
    """(mark or "", bytes) of every mark and every allocation (+) or free (-)."""
    # One list, as a rule. Another thread that autograd had work for the first one comes after it, for want of a clock.
    for events in threads:
        for event in events:
            kind = event.kind()
            if kind == "memory_alloc":
                yield "", event.cpu_memory_usage()
            elif kind == "push" and event.name().startswith(_MARK):
                yield event.name(), 0


class _CudaWatch:
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


def _counters(device: torch.device) -> tuple[int, int]:
    """What PyTorch has handed out on `device`, now and at the most."""
    found = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return found["current"], found["peak"]
