"""A measured graph as one stage, compiled whole: of the partitions of its joint graph, the fastest that fits.

Cut into stages, a graph is compiled piece by piece, and nothing is fused, laid out or shared across a border. As one
stage it is as fast as under `torch.compile`. What its forward saves is then no matter of the plan, which can but store
the one stage, but of the partitioner. That knows the bytes of every partition before anything is compiled, as far as
they show in the graph. What Inductor makes of it is measured, as any stage is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from rotor_profiling import storage_bytes, tensors_in
from rotor_py.capture.measured_graphs import MeasuredGraph
from rotor_py.compile.compiled_stage import CompiledStage, StageCompiler
from rotor_py.compile.stage_code import owned_tensors
from rotor_py.errors import InfeasibleError, record_fields
from rotor_py.measure.cut import joined
from rotor_py.measure.measurement import Measurement
from rotor_solver.progress import Progress

if TYPE_CHECKING:
    from rotor_profiling.torch_compat import CustomPartitionerFn

_log = logging.getLogger("rotor_py")

_ATTEMPTS = 5
"""Partitions that are compiled for one limit, at most: others where the first needs more than was foreseen, or so much
less that a faster one may fit, and where the limit is between the peaks of two. A guess: of a U-Net, three in a row
took 1 to 3 % too much, and its stages, which are what is left then, took 30 % longer."""
_FEW_ATTEMPTS = 3
"""From so many on, the next one has to be worth more waiting."""

_WORTH_COMPILING = 0.01
"""How much faster another one has to be by its graph, if one fits. A guess: it costs as much waiting."""
_WORTH_MORE_WAITING = 0.03
"""The same after a few attempts, and for one that is tried because its graph may show too much. A guess."""


_CAUTION = 0.75
"""How much of what the first one left the second one may take: it is fused otherwise. A guess; with all of it, a Llama
came out 1 % over its limit."""

_SHOWN_TOO_MUCH = 0.04
"""How much more than its code takes a graph may show. A guess: for a ViT within 82.6 MB, a partition showed 84.9 MB and
took 82.0, and was 6 % faster than the next one."""

_UNCERTAIN = 1.2
"""How much more than the limit the least partition may take by its graph, to be tried all the same: how Inductor fuses
and lays out is not known before. A guess: where it was looked at, the graph showed up to a tenth too much.
"""

_TURNS = 4
"""How often two ways are timed to be compared. A guess."""
_MORE_TURNS = 8
"""And how often again before one is given up: what disturbed the machine for a while has then passed. A guess."""
_CLEARLY = 0.02
"""How much slower compiled code has to be not to be taken: times are known no better (`GOOD_ENOUGH`), and whoever asked
for it would else get other last digits from one day to the next."""
_BY_CHANCE = 0.005
"""How much longer the first of two compiled ways may take and still be taken: the shortest runs of the same code are so
far apart. A guess."""


class Room(Protocol):
    """What a step leaves for a graph that is compiled whole, in bytes."""

    @property
    def limit(self) -> int:
        """The limit of the whole step."""

    @property
    def fixed(self) -> int:
        """What is in memory throughout the step, whatever the plan."""

    def peak(self, measurement: Measurement) -> int:
        """The peak of a step that stores all stages of a graph measured so."""

    def partitioner(self, limit: int) -> Partitioner:
        """What partitions a graph within `limit`, counting all that its compiled code is given, and makes."""


class Partitioner(Protocol):
    """Chooses what the forward of a compiled graph saves."""

    @property
    def function(self) -> CustomPartitionerFn:
        """As Inductor takes it."""

    @property
    def peak(self) -> int:
        """The bytes of what was chosen last."""

    def gain(self, limit: int) -> float:
        """By which part of its time the same graph would be faster within another limit, as far as it shows."""

    def rival(self) -> Partitioner | None:
        """One within the same limit that chooses otherwise, if nobody can tell before which is faster."""


RoomOf = Callable[[Measurement, Any], Room]
"""The room that a step leaves, by what it costs plain and by what goes into the graph."""


def compiled_whole(
    plain: MeasuredGraph, compiler: StageCompiler, room: Room, progress: Progress | None = None
) -> MeasuredGraph | None:
    """The graph as one compiled stage, the fastest inside the room.

    None if there is none that fits, or if plain it fits as well, and is clearly faster.
    """
    if plain.cut.prefix:  # its stages take what the layers before them return, which nobody has at hand
        return None
    layers = dict(plain.graph.layers)
    names = tuple(name for group in plain.cut.groups() for name in group)
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    _, whole = joined([(each, layers[each]) for each in names])
    given = storage_bytes([*owned_tensors(whole), *tensors_in(plain.shared)])

    def compiled(partitioner: Partitioner) -> MeasuredGraph | None:
        """None if it cannot be compiled, or needs more memory than there is, which was not foreseen."""
        if progress is not None:
            progress(0, 1, "the whole graph, compiled")
        stage = CompiledStage(whole, "the graph as a whole", compiler, partitioner=partitioner.function)
        try:
            if stage.prepare(plain.shared):
                return plain.measured_as(replace(plain.cut, stages=((name, stage),), members=(names,)))
        except torch.OutOfMemoryError:
            pass
        return None

    began, room_here = compiler.seconds, room.limit - room.fixed
    limit, least = room_here + given, 0
    tried: list[Tried] = []
    best: tuple[MeasuredGraph, Partitioner] | None = None
    while len(tried) < _ATTEMPTS:
        partitioner = room.partitioner(limit)
        try:
            found = compiled(partitioner)
        except InfeasibleError as error:
            compiled_before = any(each.shown <= error.min_bytes - given for each in tried)
            if least or compiled_before or error.min_bytes > _UNCERTAIN * limit:
                break
            limit = least = error.min_bytes
            continue
        if found is None:
            break
        peak = room.peak(found.measurement)
        if peak <= room.limit and (best is None or not slower(found, best[0])):
            best = found, partitioner
        tried.append(Tried(partitioner.peak - given, peak - room.fixed))
        limit = given + next_shown(tried, room_here)
        if best is None:
            continue
        needless = best[1].gain(limit) < (_WORTH_COMPILING if len(tried) < _FEW_ATTEMPTS else _WORTH_MORE_WAITING)
        if needless and len(tried) == 1:
            # By what has been seen, nothing faster fits. Its graph may show too much.
            limit = given + int((1 + _SHOWN_TOO_MUCH) * room_here)
            needless = best[1].gain(limit) < _WORTH_MORE_WAITING
        if needless or (len(tried) == 2 and all(each.taken <= room_here for each in tried)):
            break
    if best is None:
        return None
    if (rival := best[1].rival()) is not None:
        with suppress(InfeasibleError):  # found when less was left for what Inductor needs
            other = compiled(rival)
            if other is not None and room.peak(other.measurement) <= room.limit and slower(best[0], other, _BY_CHANCE):
                best = other, rival
    _log.info("compiled the graph as a whole in %.1f s", compiler.seconds - began, extra=record_fields("compiled"))
    if room.peak(plain.measurement) > room.limit:  # plain, it would have to run again what it cannot store
        return best[0]
    # Not beside the stages' times: one by one they find their memory in caches, and together they do not.
    as_one = plain.measured_as(replace(plain.cut, stages=((name, whole),), members=(names,)))
    return None if slower(best[0], as_one) else best[0]


class Tried(NamedTuple):
    """A partition that was compiled: the bytes that its graph shows, and those that its code takes."""

    shown: int
    taken: int


def next_shown(tried: Sequence[Tried], room: int) -> int:
    """The bytes that the next partition may show, for its code to take no more than `room`."""
    under = [each for each in tried if each.taken <= room]
    over = [each for each in tried if each.taken > room]
    if under and over:
        low, high = max(under), min(over)
        between = (high.shown - low.shown) * (room - low.taken) // (high.taken - low.taken)
        return min(low.shown + between, high.shown - 1)
    # As much more or less than it shows, the next one will need as well.
    shown = tried[-1].shown
    enough = min(room * each.shown // max(1, each.taken) for each in tried)
    if over:
        # It may need more once again: with less to keep, other kernels are made. So steps grow.
        return min(shown - len(over) * (shown - enough), shown - 1)
    start = max(room, shown)
    return start + int(_CAUTION * max(0, enough - start))


def slower(found: MeasuredGraph, other: MeasuredGraph, tolerance: float = _CLEARLY) -> bool:
    """Whether a step with everything stored takes longer than another way of it, by more than `tolerance`.

    Both are timed anew, in turns, since a busy machine disturbs one for a while and then the other. What disturbs a run
    makes it longer: the shortest of each counts.
    """
    mine, theirs = float("inf"), float("inf")
    for turns in (_TURNS, _MORE_TURNS):
        for _ in range(turns):
            mine, theirs = min(mine, found.stages.time_again()), min(theirs, other.stages.time_again())
        if mine <= (1 + tolerance) * theirs:
            return False
    return True


def compiling(progress: Progress) -> Progress:
    """Tells what is compiled, by the same means by which it is told what is measured."""
    return lambda done, total, name: progress(done, total, f"{name}, compiled")
