"""The schedule as shapes: stages across, operations down; what runs, and what is kept for how long."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rotor_py.report.facts import ReportFacts
from rotor_py.report.wording import kind, sentence
from rotor_solver import Backward, Loss, Moment
from rotor_solver.moving import timed_moments

ROW, LEFT, TOP, RIGHT = 14, 64, 20, 8
_CELL, _LABEL = 18, 24
"""Pixels: the largest width of a stage, and from one number of a stage to the next."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Something that is in memory from row `first` to row `last`. The operation of `last` frees it, unless it `stays`.

    `kind` is "kept" for what a stage's backward needs, and "input" for a checkpoint: the stage's input alone.
    """

    stage: int
    kind: str
    first: int
    last: int
    stays: bool


@dataclass(frozen=True, slots=True)
class Ran:
    """One operation; `kind` as `wording.kind` has it. The loss stands to the right of the last stage."""

    column: int
    row: int
    kind: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class SchedulePicture:
    """In cells of `cell` by `ROW` pixels. `numbers` are the stages with their number above; the last is the loss."""

    cell: float
    numbers: tuple[tuple[int, str], ...]
    kept: tuple[Kept, ...]
    ran: tuple[Ran, ...]
    width: float
    height: int


def schedule_picture(facts: ReportFacts, room: float = math.inf) -> SchedulePicture:
    """In `room` pixels: every operation of the plan, and from when to when each stage keeps something."""
    found = timed_moments(facts.chain, facts.shown, facts.budget.link)
    names, beside = facts.measurement.names, facts.budget.beside_chain(facts.sequence)
    length = len(facts.chain)
    cell = min(_CELL, (room - LEFT - RIGHT) / (length + 1))
    every = max(5, 5 * math.ceil(_LABEL / (5 * cell)))
    numbers = [(stage, str(stage)) for stage in range(0, length, every) if (length - stage) * cell >= _LABEL / 2]
    ran = (
        Ran(
            length if isinstance(moment.operation, Loss) else moment.operation.stage,
            row,
            kind(moment),
            str(moment.operation),
            sentence(moment, names, beside),
        )
        for row, moment in enumerate(found)
    )
    return SchedulePicture(
        cell=cell,
        numbers=(*numbers, (length, "L")),
        kept=tuple(life for stage in range(length) for life in lives(found, stage)),
        ran=tuple(ran),
        width=LEFT + cell * (length + 1) + RIGHT,
        height=TOP + ROW * len(found) + 8,
    )


def lives(found: tuple[Moment, ...], stage: int) -> Iterator[Kept]:
    """Every period in which something is kept for `stage`: its input alone, or all that its backward needs."""
    first, now = 0, ""
    for row, moment in enumerate(found):
        kept = _state(moment, stage)
        if kept == now:
            continue
        if now:
            yield Kept(stage, now, first, row, stays=bool(kept) and not isinstance(moment.operation, Backward))
        first, now = row, kept
    if now:
        yield Kept(stage, now, first, len(found) - 1, stays=True)


def _state(moment: Moment, stage: int) -> str:
    if stage + 1 in moment.attached:
        return "kept"
    return "input" if moment.inputs.get(stage) else ""
