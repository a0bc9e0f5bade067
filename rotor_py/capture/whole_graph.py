"""Compile a measured graph whole, as one stage: of its joint graph's partitions, use the fastest that fits.

Compiled stage by stage, nothing is fused, laid out or shared across a border. As one stage, the graph is as fast as
under `torch.compile`. The partitioner then chooses what the forward saves, not the plan, which can only store the one
stage. The joint graph gives the bytes of every partition before anything is compiled, as far as they show in it.
Inductor's result is measured like any stage.
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
from rotor_solver.watching import Progress

if TYPE_CHECKING:
    from rotor_profiling.torch_compat import CustomPartitionerFn

_log = logging.getLogger("rotor_py")

_ATTEMPTS = 5
"""Most partitions compiled for one limit: others follow where the first needs more than predicted, or so much less that
a faster one may fit, and where the limit lies between two peaks. A guess: of a U-Net, three in a row took 1 to 3 % too
much, and compiling stage by stage instead took 30 % longer.
"""
_FEW_ATTEMPTS = 3
"""Attempts after which the next one must gain more."""

_WORTH_COMPILING = 0.01
"""Least predicted gain for compiling another partition. A guess: it costs as much waiting."""
_WORTH_MORE_WAITING = 0.03
"""The same after a few attempts, and for one tried because its graph may overstate its peak. A guess, as above."""


_CAUTION = 0.75
"""Share of the memory left by the first partition that the second may take: it is fused differently. A guess; with all
of it, a Llama came out 1 % over its limit.
"""

_SHOWN_TOO_MUCH = 0.04
"""How far a graph may overstate its code's peak. A guess: for a ViT within 82.6 MB, a partition showed 84.9 MB and took
82.0, and was 6 % faster than the next one.
"""

_UNCERTAIN = 1.2
"""Factor by which the least partition's predicted peak may exceed the limit and still be tried: Inductor's fusion and
layouts are not known before. A guess: the graph overstated by up to a tenth where measured.
"""

_TURNS = 4
"""Timings of each variant in a comparison. A guess: fewer let noise decide."""
_MORE_TURNS = 8
"""Further timings before one is rejected, after a disturbance of the machine may have passed. A guess, as above."""
_CLEARLY = 0.02
"""How much slower compiled code has to be for the plain graph to win. Times are known no better (`GOOD_ENOUGH`); a
closer choice would change a user's last digits from one day to the next.
"""
_BY_CHANCE = 0.005
"""How much longer the first of two compiled variants may take and still be used: the shortest runs of the same code
differ by so much. A guess: more keeps a slower variant.
"""


class Room(Protocol):
    """Memory that a step leaves for a graph compiled whole, in bytes."""

    @property
    def limit(self) -> int:
        """The limit of the whole step."""

    @property
    def fixed(self) -> int:
        """Memory in use throughout the step, under any plan."""

    def peak(self, measurement: Measurement) -> int:
        """The peak of a step that stores all stages of a graph measured so."""

    def partitioner(self, limit: int) -> Partitioner:
        """Return a partitioner of graphs within `limit`, counting all inputs and results of the compiled code."""


class Partitioner(Protocol):
    """Chooses what the forward of a compiled graph saves."""

    @property
    def function(self) -> CustomPartitionerFn:
        """The function that Inductor takes."""

    @property
    def peak(self) -> int:
        """The peak, in bytes, of the last chosen partition."""

    def gain(self, limit: int) -> float:
        """Predict the share of its time that the same graph would save within another limit."""

    def rival(self) -> Partitioner | None:
        """Return another partitioner for the same limit, if only timing can tell which is faster."""


RoomOf = Callable[[Measurement, Any], Room]
"""The room that a step leaves, from its plain measurement and the graph's inputs."""


def compiled_whole(
    plain: MeasuredGraph, compiler: StageCompiler, room: Room, progress: Progress | None = None
) -> MeasuredGraph | None:
    """Return the graph as one compiled stage, the fastest inside the room.

    None if no partition fits, or if the plain graph also fits and is clearly faster.
    """
    if plain.cut.prefix:  # its stages need outputs of the prefix layers, which are not available
        return None
    layers = dict(plain.graph.layers)
    names = tuple(name for group in plain.cut.groups() for name in group)
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    _, whole = joined([(each, layers[each]) for each in names])
    given = storage_bytes([*owned_tensors(whole), *tensors_in(plain.shared)])

    def compiled(partitioner: Partitioner) -> MeasuredGraph | None:
        """Compile and measure; None if it cannot be compiled, or needs more memory than there is, unforeseen."""
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
            # By the measurements so far, nothing faster fits. Its graph may overstate the peak.
            limit = given + int((1 + _SHOWN_TOO_MUCH) * room_here)
            needless = best[1].gain(limit) < _WORTH_MORE_WAITING
        if needless or (len(tried) == 2 and all(each.taken <= room_here for each in tried)):
            break
    if best is None:
        return None
    if (rival := best[1].rival()) is not None:
        with suppress(InfeasibleError):  # found when less was left for Inductor's own needs
            other = compiled(rival)
            if other is not None and room.peak(other.measurement) <= room.limit and slower(best[0], other, _BY_CHANCE):
                best = other, rival
    _log.info("compiled the graph as a whole in %.1f s", compiler.seconds - began, extra=record_fields("compiled"))
    if room.peak(plain.measurement) > room.limit:  # the plain graph would have to recompute
        return best[0]
    # Timed as one, not as the sum of its stages, which one by one find their memory in caches.
    as_one = plain.measured_as(replace(plain.cut, stages=((name, whole),), members=(names,)))
    return None if slower(best[0], as_one) else best[0]


class Tried(NamedTuple):
    """A compiled partition: the peak in bytes that its graph shows, and the peak of its code."""

    shown: int
    taken: int


def next_shown(tried: Sequence[Tried], room: int) -> int:
    """Return the bytes that the next partition may show, for its code to take at most `room`."""
    under = [each for each in tried if each.taken <= room]
    over = [each for each in tried if each.taken > room]
    if under and over:
        low, high = max(under), min(over)
        between = (high.shown - low.shown) * (room - low.taken) // (high.taken - low.taken)
        return min(low.shown + between, high.shown - 1)
    # The next one is expected to need more or less than it shows in the same proportion.
    shown = tried[-1].shown
    enough = min(room * each.shown // max(1, each.taken) for each in tried)
    if over:
        # It may need more again: with less to save, other kernels are made. So steps grow.
        return min(shown - len(over) * (shown - enough), shown - 1)
    start = max(room, shown)
    return start + int(_CAUTION * max(0, enough - start))


def slower(found: MeasuredGraph, other: MeasuredGraph, tolerance: float = _CLEARLY) -> bool:
    """Whether a step with everything stored takes longer than another variant, by more than `tolerance`.

    Both are timed anew, in turns: a busy machine disturbs one for a while and then the other. Disturbances only
    lengthen runs, so the shortest of each counts.
    """
    mine, theirs = float("inf"), float("inf")
    for turns in (_TURNS, _MORE_TURNS):
        for _ in range(turns):
            mine, theirs = min(mine, found.stages.time_again()), min(theirs, other.stages.time_again())
        if mine <= (1 + tolerance) * theirs:
            return False
    return True


def compiling(progress: Progress) -> Progress:
    """Return a progress callback that reports stages as being compiled."""
    return lambda done, total, name: progress(done, total, f"{name}, compiled")
