"""Run a sequence as nested regions, each of which autograd's own nodes recompute.

A memory-persistent sequence is such a nesting: `CF_i, Fn_{i+1}, …, Fn_{j-1}` opens the region of stages i … j-1, which
is recomputed just before its backward, when part of it may again be a region. The engine sees the operators themselves
and no node of ours, so hooks on modules and parameters keep working: `fully_shard` gathers parameters before a stage
runs, and again before its backward. That is why such models do not use a tape.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Operations
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from rotor_profiling.storage import tensors_in, wait_for
from rotor_py.distributed.sharding import gathered_again
from rotor_py.errors import InvalidValueError
from rotor_py.execute.recompute import saved_again
from rotor_py.stage.forward_state import Surroundings
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.runner import StageRunner
from rotor_solver import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence


@dataclass(frozen=True, slots=True)
class Region:
    """Stages recomputed in the backward from the input of the first: stages and regions, in order."""

    items: tuple[int | Region, ...]


def regions(sequence: Sequence) -> tuple[int | Region, ...]:
    """Return the stages of a sequence in order, with the regions that are recomputed.

    Raises ValueError if the sequence is not memory-persistent (it drops a checkpoint before the backward that uses it),
    or keeps a checkpoint in low precision.
    """
    items, rest = _items(list(sequence))
    if rest:
        raise InvalidValueError(
            f"the sequence is not a nesting of regions: {rest[0]} comes where no region is open", kind="not_nested"
        )
    return items


def _items(operations: list[Operation]) -> tuple[tuple[int | Region, ...], list[Operation]]:
    """Read the forwards at the beginning of `operations`, up to and including all of their backwards."""
    found: list[tuple[int, int, bool]] = []  # first stage, the one after the last, whether it is attached
    at = 0
    while at < len(operations) and not isinstance(operations[at], Backward | Loss):
        match operations[at]:
            case ForwardEnable(stage):
                found.append((stage, stage + 1, True))
            case ForwardCheck(stage):
                found.append((stage, stage + 1, False))
            case ForwardNograd(stage) if found and not found[-1][2] and found[-1][1] == stage:
                found[-1] = (found[-1][0], stage + 1, False)
            case other:
                raise InvalidValueError(
                    f"the sequence is not a nesting of regions: {other} follows no ForwardCheck", kind="not_nested"
                )
        at += 1
    rest = operations[at + 1 :] if operations[at : at + 1] == [Loss()] else operations[at:]
    items: list[int | Region] = []
    # From the last: its backward comes first, and a region's recompute stands right before the region's backwards.
    for first, stop, attached in reversed(found):
        if attached:
            if not rest or rest[0] != Backward(first):
                raise InvalidValueError(
                    f"the sequence is not a nesting of regions: no {Backward(first)} where it has to be",
                    kind="not_nested",
                    stage=first,
                )
            items.append(first)
            rest = rest[1:]
        else:
            inside, rest = _items(rest)
            if _stages(inside) != list(range(first, stop)):
                raise InvalidValueError(
                    f"the sequence is not a nesting of regions: stages {first} to {stop - 1} do not come back",
                    kind="not_nested",
                    stage=first,
                )
            items.append(Region(inside))
    return tuple(reversed(items)), rest


def _stages(items: tuple[int | Region, ...]) -> list[int]:
    return [stage for item in items for stage in (_stages(item.items) if isinstance(item, Region) else [item])]


def run(
    runners: Operations[StageRunner],
    items: tuple[int | Region, ...],
    value: Any,
    options: Mapping[int, int] = MappingProxyType({}),
    context: tuple[Any, ...] = (),
) -> Any:
    """Run a chain forward in the caller's graph, and recompute its regions in the backward.

    `items` come from `regions`, for as many stages as there are runners. `options` are the storage options of stages
    that are not stored whole. All stages share `context`.
    """
    again = frozenset(stage for item in items if isinstance(item, Region) for stage in _stages(item.items))
    stored = [runner.by(options.get(stage, 0)) for stage, runner in enumerate(runners)]
    return _Chain(runners, stored, again, context).store(items, value)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The stages in one forward: runners to recompute (`again`), and the forward state of each first run."""

    runners: Operations[StageRunner]
    stored: list[StageRunner]
    """the stages with their storage options"""
    again: frozenset[int]
    context: tuple[Any, ...]
    known: dict[int, Surroundings] = field(default_factory=dict)

    def store(self, items: tuple[int | Region, ...], value: Any) -> Any:
        """Run stages and regions in order; stages outside of regions are stored."""
        for item in items:
            if isinstance(item, Region):
                first, inside = partial(self._leave, _stages(item.items)), partial(self.store, item.items)
                value = saved_again(first, inside, value)
                for tensor in tensors_in(value):
                    if tensor.requires_grad:
                        # Wait for pending collectives before the region is recomputed: sent tensors stay in memory
                        # until then.
                        tensor.register_hook(wait_for)
            elif item in self.again:
                value = self._run_again(self.stored[item], self.known[item], value)
            else:
                value = self.stored[item].forward(value, self.context)
        return value

    def _leave(self, stages: list[int], value: Any) -> Any:
        """Run the stages of a region, and store nothing of them."""
        for stage in stages:
            # Storing in part would hold the values to be recomputed. But storage modes that are other code give other
            # digits.
            by_way = offers_of(self.runners[stage].function).ways_are_code
            runner = self.stored[stage] if by_way else self.runners[stage]
            if stage in self.known:
                value = self._run_again(runner, self.known[stage], value)
            else:
                value, self.known[stage] = runner.first(value, self.context)
        return value

    def _run_again(self, runner: StageRunner, surroundings: Surroundings, value: Any) -> Any:
        function = runner.function
        restored = surroundings.restored(function, graph=torch.is_grad_enabled(), alike=True)
        with restored, gathered_again(function):
            # A module may have begun in an earlier stage, which is not always recomputed right before this one.
            offers_of(function).gather_begun()
            return runner.forward(value, self.context)
