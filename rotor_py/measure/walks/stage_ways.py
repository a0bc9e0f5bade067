"""Which ways to store a stage are measured, which are timed, and which a plan may choose among."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from zlib import crc32

import torch
import torch.distributed as dist

from rotor_profiling import StageBytes, StageCost
from rotor_profiling.stage.bytes import clearly_less
from rotor_profiling.timing import several_processes
from rotor_py.distributed.processes import anywhere, largest_anywhere
from rotor_py.measure.measurement import Way
from rotor_py.stage.keepers.fewer_bits import word_of
from rotor_py.stage.ways.names import base_of


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
