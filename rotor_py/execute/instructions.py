"""Translate a solver's sequence into `Instructions`, which `Tape` follows; make the `Runners` that run stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Operations
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

from rotor_profiling.storage import wait_for
from rotor_py.errors import InvalidValueError
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.runner import StageRunner
from rotor_solver import (
    Backward,
    Chain,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Loss,
    Operation,
    Option,
    Sequence,
    Stage,
    simulate,
    skipped_outputs,
)
from rotor_solver.offload import Moves


@dataclass(frozen=True, slots=True)
class Step:
    """One operation. `live`: indices i of the stage inputs a_i that later operations read from the tape."""

    operation: Operation
    live: frozenset[int]
    skips_output: bool = False


@dataclass(frozen=True, slots=True)
class Instructions:
    """The operations before the loss (`forward`), those after it (`replay`), and facts about stages.

    The first forward of a stage `in_graph` adds its operators to the caller's graph, so the engine runs its backward
    without the tape. If such a stage is `awaited`, the sequence has forwards or offloads (`moves`) right before its
    backward, which the tape runs from a hook. A `recomputed` stage has several forwards. `backward_at` gives the index
    of each stage's backward in `replay`. Each of the `pieces` of `forward` is a single operation, or consecutive
    forwards of stages in the graph, which may run as one function.
    """

    replay: tuple[Step, ...]
    backward_at: dict[int, int]
    recomputed: frozenset[int]
    forward: tuple[Step, ...] = ()
    pieces: tuple[tuple[Step, ...], ...] = ()
    in_graph: frozenset[int] = frozenset()
    awaited: frozenset[int] = frozenset()
    moves: Moves | None = None
    options: Mapping[int, int] = field(default_factory=dict)
    """Maps stages to the index of their storage option; stages with option 0, which store all, are left out."""
    runs_after_backward: frozenset[int] = frozenset()
    """Stages that the replay runs again after their backward; only sequences by hand do that."""


# Cached, since training by hand calls this in every step. 64 is a guess: a process that alternates between more
# sequences translates them again.
@lru_cache(maxsize=64)
def read_sequence(stages: int, sequence: Sequence) -> Instructions:
    """Translate `sequence` for `stages` stages. ValueError if it is invalid, or offloads stages that it recomputes."""
    # Simulate a chain with all costs 1: whether a sequence is valid does not depend on costs.
    options = 1 + max((each.option for each in sequence if isinstance(each, ForwardEnable)), default=0)
    simulate(Chain((Stage(1, (Option(1.0, 1.0, 1),) * options),) * stages, input_bytes=1), sequence)
    operations = tuple(sequence)
    first: dict[int, int] = {}  # position of the first run of each stage
    for position, each in enumerate(operations):
        if not isinstance(each, Loss | Backward):
            first.setdefault(each.stage, position)
    in_graph = frozenset(stage for stage, at in first.items() if isinstance(operations[at], ForwardEnable))
    live = _liveness(operations, first)
    skipped = skipped_outputs(sequence)
    steps = [
        Step(operation, needed, position in skipped)
        for position, (operation, needed) in enumerate(zip(operations, live, strict=True))
    ]
    loss = operations.index(Loss())
    replay = operations[loss + 1 :]
    backward_at = _backward_at(replay)
    # If its backward is the first operation after the loss (`at` is 0), no other operation runs right before it.
    awaited = {i for i in in_graph if (at := backward_at[i]) and not isinstance(replay[at - 1], Backward)}
    if (moves := sequence.moves) is not None:
        after = [bool(out or back) for out, back in zip(moves.wait_out, moves.fetch, strict=True)][loss + 1 :]
        awaited |= {i for i in in_graph if after[backward_at[i]]}
    forwards = Counter(each.stage for each in operations if not isinstance(each, Loss | Backward))
    recomputed = frozenset(stage for stage, runs in forwards.items() if runs > 1)
    if moves is not None and (moves.stages & recomputed or not moves.stages <= in_graph):
        text = f"the sequence offloads from stages {sorted(moves.stages)}, and must not recompute any of them"
        raise InvalidValueError(text, kind="moved_stage_runs_again", stage=min(moves.stages))
    alone = recomputed | awaited if moves is None else in_graph
    return Instructions(
        tuple(steps[loss + 1 :]),
        backward_at,
        recomputed,
        forward=tuple(steps[:loss]),
        pieces=_pieces(steps[:loss], in_graph - alone),
        in_graph=in_graph,
        awaited=frozenset(awaited),
        moves=moves,
        options={each.stage: each.option for each in operations if isinstance(each, ForwardEnable) and each.option},
        runs_after_backward=frozenset(
            each.stage
            for position, each in enumerate(replay)
            if not isinstance(each, Loss | Backward) and position > backward_at[each.stage]
        ),
    )


def from_input(stages: int, sequence: Sequence) -> Instructions:
    """Translate `sequence` for the first `stages` stages of a chain, to resume a backward from the chain's input.

    All its forwards are recomputes. In place of its loss, the backward has the gradient of the last of these stages.
    """
    read_sequence(stages, sequence)  # ValueError if it is invalid
    operations = [each for each in sequence if not isinstance(each, Loss)]
    skips = [
        isinstance(each, ForwardEnable) and following == Backward(each.stage)
        for each, following in pairwise(operations)
    ]
    replay = tuple(map(Step, operations, _liveness(operations, {}), [*skips, False]))
    return Instructions(replay, _backward_at(operations), frozenset(range(stages)))


def _backward_at(operations: Operations[Operation]) -> dict[int, int]:
    return {each.stage: position for position, each in enumerate(operations) if isinstance(each, Backward)}


def _pieces(steps: Operations[Step], plain: Collection[int]) -> tuple[tuple[Step, ...], ...]:
    """Group consecutive forwards that may run as one function: of `plain` stages that store all and keep no input."""

    def joins(step: Step) -> bool:
        each = step.operation
        whole = isinstance(each, ForwardEnable) and each.option == 0
        return whole and each.stage in plain and each.stage not in step.live  # type: ignore[union-attr] # no loss here

    found: list[tuple[Step, ...]] = []
    for together, group in groupby(steps, joins):
        members = tuple(group)
        found += [members] if together else [(step,) for step in members]
    return tuple(found)


def _liveness(operations: Operations[Operation], first: dict[int, int]) -> list[frozenset[int]]:
    """Return, for every operation, the indices of the stage inputs that the tape must hold after it.

    The tape must hold an input if a later forward reads it before another forward computes it anew. `first` maps stages
    to the position of their first forward, which gets its input from the stage before, not from the tape. While an ā
    (saved tensors of a stage) that contains an input exists, the tape keeps that input, even if it is computed anew.
    """
    saved: list[frozenset[int]] = [frozenset()]  # for every operation, the indices of the ā that exist when it begins
    for operation in operations:
        match operation:
            case ForwardEnable(stage):
                saved.append(saved[-1] | {stage + 1})
            case Backward(stage):
                saved.append(saved[-1] - {stage + 1})
            case _:
                saved.append(saved[-1])
    live: frozenset[int] = frozenset()
    result = []
    for position in range(len(operations) - 1, -1, -1):
        result.append(live)
        match operations[position]:
            case ForwardEnable(stage) | ForwardCheck(stage) | ForwardNograd(stage):
                if first.get(stage) == position:
                    live = live if stage in saved[position] else live - {stage}
                else:  # reads its input from the tape, and computes its output anew
                    live = (live if stage + 1 in saved[position] else live - {stage + 1}) | {stage}
    return result[::-1]


JoinedRun = Callable[[list[Any], tuple[Any, ...]], tuple[Any, ...]]
"""Runs several stages as one. Arguments: the first one's input in a list, which it empties; values all stages share."""


def joined_run(stages: Operations[StageRunner]) -> JoinedRun | None:
    """Return a function that runs these consecutive stages as one; None if they have to run one by one."""
    parts = [(part, each.name) for each in stages for part in offers_of(each.function).parts]
    run = parts[0][0].run_through([part for part, _ in parts[1:]]) if parts else None
    if run is None:
        return None
    names, shared, last = [name for _, name in parts], parts[0][0].shared, parts[-1][0].last

    def joined(values: list[Any], context: tuple[Any, ...]) -> tuple[Any, ...]:
        carried = 0 if context else shared  # number of values at the end of the input that all stages share
        handed_on = values[len(values) - carried :]
        values += context
        made = run(values, names.__getitem__)
        wait_for(made)  # as `StageRunner` does: a collective keeps its tensors in memory until it is waited for
        return made if last or not carried else (*made, *handed_on)

    return joined


class Runners(list[StageRunner]):
    """The runners of a chain's stages, with the functions that run several of these stages as one."""

    def __init__(self, runners: Iterable[StageRunner]) -> None:
        super().__init__(runners)
        self._joined: dict[tuple[int, int], JoinedRun | None] = {}

    def by(self, options: Mapping[int, int]) -> Runners:
        """Return runners with these storage options, and 0 for other stages. ValueError if a stage lacks its option."""
        return Runners(runner.by(options.get(stage, 0)) for stage, runner in enumerate(self))

    def joined(self, first: int, stop: int) -> JoinedRun | None:
        key = first, stop
        if key not in self._joined:
            self._joined[key] = joined_run(self[first:stop])
        return self._joined[key]
