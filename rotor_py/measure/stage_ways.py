"""Which ways to store a stage are measured, which are timed, and which a plan may choose among."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from rotor_profiling import StageBytes, StageCost, isolated, leaves_of
from rotor_profiling.stage.bytes import clearly_less
from rotor_profiling.storage import allocated
from rotor_profiling.timing import several_processes
from rotor_py.distributed.processes import anywhere, largest_anywhere
from rotor_py.measure.measurement import Way
from rotor_py.stage.low_precision import word_of
from rotor_py.stage.runner import StageRunner, run_leaving
from rotor_py.stage.storage_modes import ELSEWHERE, base_of, both


def offered_everywhere(names: Sequence[str], group: dist.ProcessGroup | None, device: torch.device) -> tuple[str, ...]:
    """The names with which those of all processes begin: parts of tensors are of several sizes, and so are parts that a
    stage keeps. All have to call this.
    """
    for position in count():
        name = names[position] if position < len(names) else ""
        code = crc32(name.encode())
        most, least_negated = largest_anywhere([code, -code], group, device)
        # Where a process has no name, the codes of the others are not its own: all stop at the same position.
        if not name or most != -least_negated:
            break
    return tuple(names[:position])


def stand_ins(names: Sequence[str]) -> dict[int, int]:
    """Which way of a stage makes which other one needless if it saves clearly less: see `saving_ones`.

    They are numbered from 1 on; 0 stores the stage whole.
    """
    at = {name: number for number, name in enumerate(names, 1)}
    bases = ((name, base_of(name, at)) for name in names if word_of([name]) is None)
    return {at[base]: at[name] for name, base in bases if base is not None}


def saving_ones(
    whole: StageBytes,
    ways: Sequence[tuple[str, StageBytes]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> list[tuple[str, StageBytes]]:
    """The ways that are worth timing: those that save clearly less than the stage stored whole, in any process.

    A way with a keeper has to save clearly less than the same way without it. If it is as exact, it then stands in for
    that: whoever makes tensors again to have memory has the others kept for less.
    """
    saved = {name: way.saved_bytes for name, way in ways}
    found, replaced = [], set()
    for name, way in ways:
        base = base_of(name, saved)
        before = whole.saved_bytes if base is None else saved[base]
        if anywhere(clearly_less(way.saved_bytes, before), group, device):
            found.append((name, way))
            if word_of([name]) is None:
                replaced.add(base)
    return [(name, way) for name, way in found if name not in replaced]


def worth_choosing(whole: StageCost, ways: Sequence[Way]) -> tuple[Way, ...]:
    """The ways without those that are no better in anything, in bytes or seconds, than the whole stage or another.

    Where several processes have measured, all are left: clocks differ, and the n-th way has to be the same in each.
    """
    if several_processes():
        return tuple(ways)
    needs = [_needs(whole), *(_needs(way.cost) for way in ways)]

    def beaten(at: int) -> bool:
        return any(
            all(theirs <= mine for theirs, mine in zip(other, needs[at], strict=True))
            # Of equal ones, the first is left.
            and (other != needs[at] or before < at)
            for before, other in enumerate(needs)
        )

    return tuple(way for at, way in enumerate(ways, 1) if not beaten(at))


def _needs(cost: StageCost) -> tuple[float, ...]:
    """What is better if it is less."""
    scratch = (cost.forward_temp_bytes, cost.backward_temp_bytes, cost.replay_temp_bytes)
    return (
        cost.forward_seconds + cost.backward_seconds,
        cost.saved_bytes,
        *(cost.saved_bytes + each for each in scratch),
        -cost.input_released_bytes,
        -cost.output_released_bytes,
    )


class OffloadableBytes:
    """Bytes by the kind of stage, each found by a run on `device` of the first of its kind, in each way to store it.

    They are counted by what moves them in training, so that what is planned with is what will leave. Where a process of
    the `group` can move something of a stage in a way, all of them have that way.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = group
        self._found: dict[Hashable, dict[str, int]] = {}

    def measure(self, kind: Hashable, ways: Sequence[str], runners: Sequence[StageRunner], value: Any) -> None:
        """Run a stage on its input `value`, stored whole and in `ways`, unless its kind is known in all processes.

        The first of the `runners` stores it whole, and the others in one of the ways each.
        """
        if not anywhere(kind not in self._found, self._group, self._device):
            return
        found = [(way, self._leaving(runner, value)) for way, runner in zip(("", *ways), runners, strict=True)]
        self._found[kind] = {way: size for way, size in found if anywhere(size > 0, self._group, self._device)}

    def _leaving(self, runner: StageRunner, value: Any) -> int:
        with isolated(runner.function, self._device), torch.enable_grad():
            output, leaving = run_leaving(runner, leaves_of(value))
            found = sum(allocated(piece.nbytes, self._device.type) for piece in leaving.can_leave())
            del output
        return found

    def ways(self, kind: Hashable, whole: StageCost, ways: Iterable[Way]) -> tuple[Way, ...]:
        """The ways to store a stage, `whole` or in `ways`, in which what it saves is elsewhere."""
        known = self._found[kind]
        found = [_elsewhere(way, known[way.name]) for way in (Way("", whole), *ways) if way.name in known]
        # The n-th way has to be the same in all processes.
        return tuple(way for way in found if way.moved_bytes or several_processes())


def _elsewhere(way: Way, nbytes: int) -> Way:
    # What goes with the output cannot leave as well. Where a stage hands its input on, more is counted as that.
    moved = max(0, min(nbytes, way.cost.saved_bytes - way.cost.output_released_bytes))
    return Way(both(way.name, ELSEWHERE.name) if way.name else ELSEWHERE.name, way.cost, moved)
