"""The schedule as shapes: stages across, operations down; what runs, and what is kept for how long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rotor_py.report.facts import ReportFacts
from rotor_py.report.wording import kind, sentence
from rotor_solver import Backward, Loss, Moment, moments

CELL, ROW, LEFT, TOP = 18, 14, 64, 20


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
    """In cells of `CELL` by `ROW` pixels."""

    names: tuple[str, ...]
    kept: tuple[Kept, ...]
    ran: tuple[Ran, ...]
    width: int
    height: int


def schedule_picture(facts: ReportFacts) -> SchedulePicture:
    """Every operation of the plan, and from when to when each stage keeps something."""
    found = moments(facts.chain, facts.shown)
    names, beside = facts.measurement.names, facts.budget.beside_chain(facts.sequence)
    length = len(facts.chain)
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
        names=(*names, "loss"),
        kept=tuple(life for stage in range(length) for life in lives(found, stage)),
        ran=tuple(ran),
        width=LEFT + CELL * (length + 1) + 8,
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
