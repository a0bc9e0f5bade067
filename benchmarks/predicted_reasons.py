"""Why a step takes less or more than its plan promises: which bytes, of what kind, and since when.

The step is taken once more, operation by operation of its sequence. Noted are the most bytes during each, which of the
tensors that a plan counts are still there when it begins, and which outputs get a gradient. What is promised and not
there is then named, at the operation at which the plan has its peak. What is left over has a place: the operation from
which on it differs, and, where a step takes more than is promised, the operators that hold more than the rules say.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, Protocol
from unittest.mock import patch

import torch
from cpu_scratch import cpu_scratch_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling import storage_bytes, storages, tensors_in
from rotor_profiling.memory import CpuMeter, Phase
from rotor_py import Checkpointable
from rotor_py.execute.instructions import Runners
from rotor_py.execute.tape import Tape
from rotor_solver import Backward, Loss, Operation, simulate

_SAME = 1024
"""Sizes that differ by no more are the same: numbers that are kept, and what is there for a moment."""
Storages = list[weakref.ref[Any]]


class RealStep(Protocol):
    """A training step that can be repeated; it calls `begins` with the names of its phases."""

    network: Checkpointable
    optimizer: torch.optim.Optimizer
    inputs: dict[str, Any]
    loss: Any

    def __call__(self, begins: Callable[[str], None]) -> object: ...
    def prepare(self) -> None: ...
    def present(self) -> list[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """When an operation begins: what is there of the graph's inputs, and of what each stage returned at first."""

    operation: str
    inputs: int
    made: dict[int, list[int]]


@dataclass(slots=True)
class Followed:
    """A step, seen at every operation of its sequence."""

    begins: Callable[[str], None] = lambda _: None
    moments: list[Moment] = field(default_factory=list)
    inputs: Storages = field(default_factory=list)
    made: dict[int, Storages] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    """outputs of the last stage, by number, to which no gradient has come"""

    def come_to(self, operation: object) -> None:
        made = {stage: [_bytes([each]) for each in found] for stage, found in self.made.items()}
        self.moments.append(Moment(str(operation), _bytes(self.inputs), made))
        self.begins(str(len(self.moments) - 1))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, tapes tell of what they do."""
        forward, run_next, run_again, advance = Tape._forward, Tape._run_next, Tape._recompute, Tape._advance
        come: set[int] = set()

        def begin(self_: Tape, held: Any, value: Any) -> Any:
            self.inputs = _weakly((value, self_.context))
            return forward(self_, held, value)

        def first(self_: Tape, held: Any, step: Any, stage: int, value: Any) -> Any:
            self.come_to(step.operation)
            out = run_next(self_, held, step, stage, value)
            self.made[stage] = _weakly(out)
            last, in_graph = stage == len(self_.runners) - 1, stage in self_.instructions.in_graph
            for number, tensor in enumerate(tensors_in(out)):
                if tensor.requires_grad:
                    self.unread |= {number} if last else set()
                    # The tape is not among the arguments: a hook would keep it alive, and with it what it holds.
                    tensor.register_hook(partial(arrived, stage, number, last, in_graph))
            return out

        def arrived(stage: int, number: int, last: bool, in_graph: bool, gradient: torch.Tensor) -> None:
            self.unread -= {number} if last else set()
            if in_graph and stage not in come:
                come.add(stage)
                self.come_to(Backward(stage))

        def again(self_: Tape, held: Any, step: Any) -> None:
            self.come_to(step.operation)
            run_again(self_, held, step)

        def advanced(self_: Tape, current: Any, stage: int) -> None:
            advance(self_, current, stage)
            if stage not in self_.instructions.in_graph:
                self.come_to(Backward(stage))

        changed = {"_forward": begin, "_run_next": first, "_recompute": again, "_advance": advanced}
        with patch.multiple(Tape, **changed), patch.object(Runners, "joined", lambda *_: None):
            yield

    def begin(self, phase: str) -> None:
        self.come_to(Loss() if phase == "loss" else phase)


def reason(step: RealStep, predicted: Checkpointable, measured: int) -> str:
    """Where the bytes are by which a step by the plan of `predicted` differs, the largest part first.

    It takes `measured` bytes. A plus says that more is promised than there is.
    """
    sequence, budget = predicted.sequence, predicted.budget
    assert sequence is not None
    assert budget is not None
    during = simulate(budget.chain, sequence).during
    at = max(range(len(during)), key=during.__getitem__)
    followed, phases = _followed(step)
    operations, names = list(sequence), [each.operation for each in followed.moments]
    places = _matched([str(each) for each in operations], names)
    if at not in places or budget.peak_bytes(sequence) > budget.beside_chain(sequence) + during[at]:
        return f"the peak is that of the optimizer's step, {budget.optimizer_peak_bytes} B"
    beside = budget.beside_chain(sequence)
    off = {place: beside + during[place] - phases[str(number)].peak for place, number in places.items()}
    left, parts, counted = off[at], list[tuple[int, str]](), list[tuple[int, str]]()
    for size, words, certain in _not_there(step, predicted, followed, at, places[at]):
        if not certain:
            counted.append((size, words))
        elif abs(size) > _SAME and abs(left - size) < abs(left):
            parts.append((size, words))
            left -= size
    sums = [some for many in range(5) for some in combinations(counted, many)]
    best = min(sums, key=lambda some: abs(left - sum(size for size, _ in some)))
    parts += best
    left -= sum(size for size, _ in best)
    if abs(left) > max(_SAME, 0.003 * budget.peak_bytes(sequence)):
        parts.append((left, _where(off, at, left, operations, predicted)))
    peaks = {place: phases[str(number)].peak for place, number in places.items()}
    top = max(peaks, key=peaks.__getitem__)
    if peaks[top] - peaks[at] > _SAME:
        parts.append((peaks[at] - peaks[top], f"as the step has its own peak at {_place(operations[top], predicted)}"))
    if measured > budget.peak_bytes(sequence):
        parts += [(-size, f"inside {name} beyond the rules") for name, size in _beyond_rules(step).items()]
    parts.sort(key=lambda part: -abs(part[0]))
    found = "; ".join(f"{size:+} B {words}" for size, words in parts) or "nothing by more than 1 kB"
    return f"{_place(operations[at], predicted)}: {found}"


def _not_there(step: RealStep, predicted: Checkpointable, followed: Followed, at: int, number: int) -> Iterator[Any]:
    """What is promised and not there at an operation, in bytes and words, and whether that is certain."""
    budget, measurement, sequence = predicted.budget, predicted.inspection_values, predicted.sequence
    assert budget is not None
    assert measurement is not None
    assert sequence is not None
    operations, there = list(sequence), followed.moments[number]
    loss, last = operations.index(Loss()), len(measurement.stages) - 1
    state = storage_bytes(tensors_in([list(each.values()) for each in step.optimizer.state.values()]))
    yield budget.fixed.optimizer - state, "of optimizer state of parameters that get no gradient", True
    if measurement.prefix:
        yield budget.fixed.batch - there.inputs, "of inputs of the graph that are gone by then", True
    if at < loss:
        yield measurement.loss.kept_bytes, "that the loss will keep", True
        yield measurement.returned_bytes, "of outputs that are not made yet", True
    else:
        outputs = there.made.get(last, [])
        unread = sum(outputs[each] for each in followed.unread)
        yield unread, "of gradients for outputs that the loss does not read", True
        yield measurement.output_bytes - sum(outputs), "of outputs that nobody holds", True
    yield from _past_stages(predicted, there, at)


def _past_stages(predicted: Checkpointable, there: Moment, at: int) -> Iterator[tuple[int, str, bool]]:
    """Tensors that go past stages: those that are gone for certain, and those that a stage may have saved as well."""
    sequence, measurement = predicted.sequence, predicted.inspection_values
    assert sequence is not None
    assert measurement is not None
    operation = list(sequence)[at]
    back, stage = isinstance(operation, Backward), getattr(operation, "stage", len(measurement.stages))
    for each in measurement.carried:
        maker = measurement.names[each.first - 1] if each.first else "the input"
        if back and each.first <= stage < each.last and each.gradient_bytes:
            words = f"of the gradient of what {maker} passes on, counted beside that of the next stage"
            yield each.gradient_bytes, words, False
        elif each.first <= stage and each.nbytes:
            if each.nbytes in there.made.get(each.first - 1, [each.nbytes]):
                yield each.nbytes, f"of {maker} that goes past stages, counted beside the stage that saved it", False
            else:
                yield each.nbytes, f"of {maker} that goes past stages, gone by then", True


def _where(off: dict[int, int], at: int, left: int, operations: list[Operation], predicted: Checkpointable) -> str:
    """From which operation on the plan and the step differ by about what is left over."""
    before = [place for place in sorted(off) if place < at and abs(off[at] - off[place]) > abs(left) / 2]
    since = min((place for place in off if place > max(before, default=-1)), default=at)
    if isinstance(operations[at], Loss):
        return "that a loss of all outputs takes, measured alone"
    if since == at:
        return "that it takes when it is measured alone"
    return f"since {_place(operations[since], predicted)}"


def _beyond_rules(step: RealStep) -> dict[str, int]:
    """Operators that hold more inside than the rules for the CPU say, and how much more at most, in a plain step."""
    meter = CpuMeter()
    calls, found = _Calls(meter), dict[str, int]()
    step.optimizer.zero_grad()
    with meter, calls:
        step.loss(step.network.model(**step.inputs)).backward()
    step.optimizer.zero_grad()
    for number, (name, new, rule) in enumerate(calls.made):
        more = meter.phases[f"call {number}"].rise - new - rule
        if more > _SAME:
            found[name] = max(found.get(name, 0), more)
    return found


class _Calls(TorchDispatchMode):
    """Marks each operator's call; of each its name, the bytes that it returns, and those inside by the rules."""

    def __init__(self, meter: CpuMeter) -> None:
        super().__init__()
        self.meter, self.made = meter, list[tuple[str, int, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meter.mark(f"call {len(self.made)}")
        out = func(*args, **(kwargs or {}))
        self.meter.mark("")
        new = storage_bytes(tensors_in(out), owned_elsewhere=storages(tensors_in((args, kwargs))))
        self.made.append((str(func), new, cpu_scratch_bytes(func, args, kwargs or {}, out)))
        return out


def _followed(step: RealStep) -> tuple[Followed, dict[str, Phase]]:
    followed = Followed()
    step.prepare()
    before = storage_bytes(step.present())
    with followed.watching(), CpuMeter() as meter:
        followed.begins = meter.mark
        step(followed.begin)
    return followed, {
        name: Phase(before + each.start, before + each.peak, before + each.end) for name, each in meter.phases.items()
    }


def _matched(operations: list[str], names: list[str]) -> dict[int, int]:
    """The positions of operations, and that of the moment at which each began; of some, nothing was seen."""
    found, begin = {}, 0
    for place, operation in enumerate(operations):
        if operation in names[begin:]:
            found[place] = names.index(operation, begin)
            begin = found[place] + 1
    return found


def _place(operation: Operation, predicted: Checkpointable) -> str:
    if isinstance(operation, Loss):
        return "the loss"
    measurement = predicted.inspection_values
    assert measurement is not None
    return f"the {'backward' if isinstance(operation, Backward) else 'forward'} of {measurement.names[operation.stage]}"


def _weakly(value: Any) -> Storages:
    return [weakref.ref(each.untyped_storage()) for each in tensors_in(value)]


def _bytes(found: Storages) -> int:
    there = {id(storage): storage.nbytes() for each in found if (storage := each()) is not None}
    return sum(there.values())
