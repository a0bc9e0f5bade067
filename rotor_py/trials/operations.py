"""When each operation of a real step begins, how long it takes, and the memory meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from rotor_profiling import Phase, measured_phases
from rotor_py.stage.activity import BACKWARD, watched
from rotor_solver import Backward, Loss, Operation, Sequence


@dataclass(frozen=True, slots=True)
class Ran:
    """An operation of a real step: seconds since the step began, and bytes in all."""

    operation: Operation
    again: bool
    begin: float
    seconds: float
    during: int
    after: int


@dataclass(frozen=True, slots=True)
class _Event:
    doing: str
    name: str
    begins: bool


_Marked = tuple[_Event, int]


def measured_operations(
    step: Callable[[], object],
    sequence: Sequence,
    names: list[str],
    present: Iterable[torch.Tensor],
    device: torch.device,
    between: Callable[[], object] = lambda: None,
) -> tuple[Ran, ...]:
    """Take `step`, which follows `sequence` in a chain of stages called `names`, twice: once for time, once for memory.

    `present` are the tensors that are there before it; `between` is called between the two. An operation lasts until
    the next one begins, so that it includes what autograd does meanwhile. Backwards that no gradient reaches are left
    out.
    """
    times: list[float] = []

    def clock() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())

    clock()
    events = _events(step, clock)
    clock()
    between()
    marks = iter(range(len(events)))

    def with_marks(mark: Callable[[str], None]) -> None:
        found = _events(step, lambda: mark(str(next(marks))))
        assert found == events, "the same step did something else the second time"

    phases = measured_phases(with_marks, present, device)
    bounds = [moment - times[0] for moment in times[1:]]
    return tuple(_ran(_begins(events, sequence, names), bounds, [phases[str(at)] for at in range(len(events))]))


def _events(step: Callable[[], object], also: Callable[[], None]) -> list[_Event]:
    """What happens while `step` runs; `also` is called at each event."""
    found: list[_Event] = []

    def note(doing: str, name: str, begins: bool) -> None:
        found.append(_Event(doing, name, begins))
        also()

    with watched(note):
        step()
    return found


def _begins(events: list[_Event], sequence: Sequence, names: list[str]) -> Iterator[tuple[int, Operation, bool]]:
    """The event at which each operation begins, and whether its stage was run before."""
    forwards = [operation for operation in sequence if not isinstance(operation, Backward | Loss)]
    before_loss = list(sequence).index(Loss())
    backward, forward = len(names), 0
    ran: set[str] = set()
    for at, event in enumerate(events):
        if event.doing == BACKWARD:
            if event.begins and event.name in names[:backward]:  # else it is the second gradient of the same stage
                backward = names.index(event.name)
                yield at, Backward(backward), False
        elif event.begins:
            yield at, forwards[forward], event.name in ran
            ran.add(event.name)
            forward += 1
        elif forward == before_loss:
            yield at, Loss(), False


def _ran(begins: Iterable[tuple[int, Operation, bool]], bounds: list[float], phases: list[Phase]) -> Iterator[Ran]:
    found = list(begins)
    ends = [*(at for at, _, _ in found[1:]), len(phases)]
    for (at, operation, again), end in zip(found, ends, strict=True):
        during = max(phase.peak for phase in phases[at:end])
        yield Ran(operation, again, bounds[at], bounds[end] - bounds[at], during, phases[end - 1].end)
