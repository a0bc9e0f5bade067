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
class TimedOperation:
    """An operation of a step: when it begins, in seconds since the step began, and how long it takes.

    `again` tells whether its stage ran before. `during` are the most bytes on the device while it runs, `after` the
    bytes at its end.
    """

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


def measured_operations(
    step: Callable[[], object],
    sequence: Sequence,
    names: list[str],
    present: Iterable[torch.Tensor],
    device: torch.device,
    between: Callable[[], object] = lambda: None,
) -> tuple[TimedOperation, ...]:
    """Take `step` twice, once for time and once for memory; it follows `sequence` in a chain of stages called `names`.

    `present` are the tensors that are on the device before the step; `between` is called between the two steps. An
    operation lasts until the next one begins, so it includes what autograd does meanwhile. Backwards that no gradient
    reaches are not in the result.
    """
    times: list[float] = []

    def clock() -> None:
        # CUDA runs behind Python: without waiting, the time of an operation would be that of starting it.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())

    clock()  # the step begins
    # Not both at once: counting memory makes a step slower.
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
    """The event at which each operation begins, and whether its stage was run before.

    Forwards come in the order of the sequence, and backwards from the last stage down; the loss is what follows the end
    of the last forward before it.
    """
    forwards = [operation for operation in sequence if not isinstance(operation, Backward | Loss)]
    before_loss = list(sequence).index(Loss())
    backward, forward = len(names), 0
    ran: set[str] = set()
    for at, event in enumerate(events):
        if event.doing == BACKWARD:
            # A stage whose output has several tensors is told once for each gradient: only the first begins anything.
            if event.begins and event.name in names[:backward]:
                backward = names.index(event.name)
                yield at, Backward(backward), False
        elif event.begins:
            yield at, forwards[forward], event.name in ran
            ran.add(event.name)
            forward += 1
        elif forward == before_loss:
            yield at, Loss(), False


def _ran(
    begins: Iterable[tuple[int, Operation, bool]], bounds: list[float], phases: list[Phase]
) -> Iterator[TimedOperation]:
    found = list(begins)
    ends = [*(at for at, _, _ in found[1:]), len(phases)]
    for (at, operation, again), end in zip(found, ends, strict=True):
        during = max(phase.peak for phase in phases[at:end])
        yield TimedOperation(operation, again, bounds[at], bounds[end] - bounds[at], during, phases[end - 1].end)
