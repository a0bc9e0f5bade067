"""Join captured stages that a sequence always runs one right after the other, so that they are one node of the graph.

A node takes as much Python time as a small stage takes to run, and a plan often recomputes several stages at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rotor_profiling import bytes_like
from rotor_profiling.isolate import trained_parameters
from rotor_profiling.stage.stage_signature import HasKind
from rotor_py.execute.instructions import Runners
from rotor_py.stage.forward_state import moving_buffers, recall_effects
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.runner import JoinedRunner, StageRunner
from rotor_solver import (
    Backward,
    Chain,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Loss,
    Operation,
    Sequence,
    simulate,
)


def joined_where_possible(runners: Runners, sequence: Sequence, chain: Chain) -> tuple[Runners, Sequence]:
    """Return the runners of joined stages and of the other ones, and the sequence for these.

    `runners` have the storage options of `sequence`, and `chain` has the stages' costs. Stages are joined only where
    that does not raise the peak: while a node runs, it holds its input, the gradients of its output, and the gradients
    of its parameters, which it returns all at once.
    """
    groups = list(_Groups(runners, sequence, chain))
    numbers = {group[0]: number for number, group in enumerate(groups)}
    found: list[Operation] = []
    for each in sequence:
        if isinstance(each, Loss):
            found.append(each)
        elif (number := numbers.get(each.stage)) is not None:  # one operation for all: that on the first stage
            found.append(replace(each, stage=number))
            if isinstance(each, ForwardEnable) and len(groups[number]) > 1:
                found[-1] = ForwardEnable(number)  # the runner of joined stages knows their options
    members = [[runners[stage] for stage in group] for group in groups]
    return Runners(own[0] if len(own) == 1 else JoinedRunner(own) for own in members), Sequence(found)


class _Groups:
    """Iterates over ranges of stages: those to join, and single ones."""

    def __init__(self, runners: Runners, sequence: Sequence, chain: Chain) -> None:
        self._runners, self._operations = runners, tuple(sequence)
        self._at: list[list[int]] = [[] for _ in runners]  # for every stage, the positions of its operations
        for position, each in enumerate(sequence):
            if not isinstance(each, Loss):
                self._at[each.stage].append(position)
        during = simulate(chain, sequence).during
        self._room = [max(during) - each for each in during]  # bytes by which the peak exceeds each operation's
        self._activation = chain.activation
        self._input_released = [max(each) for each in chain.released]
        self._trained = [trained_parameters(runner.function) for runner in runners]
        # for every stage, the bytes of gradients that its backward makes, and that do not stay in any case
        self._gradients = [
            max(0, bytes_like(own) - stage.gradient) for own, stage in zip(self._trained, chain.stages, strict=True)
        ]

    def __iter__(self) -> Iterator[range]:
        stage = 0
        while stage < len(self._runners):
            group = range(stage, stage + 1)
            while group.stop < len(self._runners) and self._may_join(range(stage, group.stop + 1)):
                group = range(stage, group.stop + 1)
            yield group
            stage = group.stop

    def _may_join(self, group: range) -> bool:
        return (
            isinstance(self._operations[self._at[group[0]][0]], ForwardCheck)  # not stored
            and all(map(_joinable, (self._runners[stage] for stage in group)))
            and self._run_together(group)
            and self._own_tensors(group)
            and self._fits(group)
        )

    def _run_together(self, group: range) -> bool:
        operations, length = self._operations, len(group)
        if any(len(self._at[stage]) != len(self._at[group[0]]) for stage in group):
            return False
        for position in self._at[group[0]]:
            following = operations[position : position + length]
            match operations[position]:
                case ForwardEnable():
                    alike = [each.stage for each in following if isinstance(each, ForwardEnable)] == [*group]
                case ForwardCheck():
                    alike = following[1:] == tuple(map(ForwardNograd, group[1:]))
                case Backward():
                    alike = operations[position + 1 - length : position] == tuple(map(Backward, group[:0:-1]))
                case _:  # frees the group's input after its first stage
                    alike = False
            if not alike:
                return False
        return True

    def _own_tensors(self, group: range) -> bool:
        """Whether no two stages of the group train one parameter, whose gradients would add up in another order than in
        plain training, or use one buffer that a stage changes, of which each would restore a copy of its own.
        """
        trained = [id(each) for stage in group for each in self._trained[stage]]
        functions: list[Any] = [self._runners[stage].function for stage in group]  # modules, as they are captured
        moving = {id(each) for function in functions for each in moving_buffers(function)}
        held = [id(each) for function in functions for each in function.buffers() if id(each) in moving]
        return len(set(trained)) == len(trained) and len(set(held)) == len(held)

    def _fits(self, group: range) -> bool:
        gradients = self._activation[group.stop]
        for stage in reversed(group):
            for position in self._at[stage]:
                more = 0
                match self._operations[position]:
                    case ForwardEnable() if stage != group[0]:
                        more = self._input_released[group[0]]
                    case Backward() if stage != group[-1]:
                        more = gradients
                if more > self._room[position]:
                    return False
            gradients += self._gradients[stage]
        return True


def _joinable(runner: StageRunner) -> bool:
    captured = isinstance(runner.function, HasKind) and not offers_of(runner.function).ways_are_code
    return captured and not recall_effects(runner.function).graph_dependent  # a run with a graph frees nothing
