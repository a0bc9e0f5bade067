"""The schedule as shapes: stages across, operations down; what runs, what is kept for how long, and what is copied."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rotor_py.report.facts import ReportFacts
from rotor_py.report.kept_kinds import WORDS, kept_kind
from rotor_py.report.wording import kind, sentence
from rotor_py.units import format_bytes, format_seconds
from rotor_solver import Backward, Chain, ForwardEnable, Loss, Moment
from rotor_solver.moving import Moves, timed_moments, transfers

ROW, LEFT, TOP, RIGHT, LANE = 14, 64, 20, 8, 14
_CELL, _LABEL = 18, 24
"""Pixels: the largest width of a stage, and from one number of a stage to the next."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Something that is in memory from row `first` to row `last`. The operation of `last` frees it, unless it `stays`.

    `kind` is one of `kept_kinds.WORDS`: "kept" for all that a stage's backward needs, "input" for a checkpoint.
    """

    stage: int
    kind: str
    first: int
    last: int
    stays: bool
    title: str


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy in the `lane` of those out (0) or back (1), from row `first` to row `last`, both with fractions."""

    lane: int
    first: float
    last: float
    title: str


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
    """In cells of `cell` by `ROW` pixels. `numbers` are the stages with their number above; the last is the loss.

    Two lanes of `LANE` pixels for copies stand to the right of that, where there are any. `kinds` has the words for
    what is kept anywhere.
    """

    cell: float
    numbers: tuple[tuple[int, str], ...]
    kept: tuple[Kept, ...]
    kinds: dict[str, str]
    copied: tuple[Copied, ...]
    ran: tuple[Ran, ...]
    width: float
    height: int


def schedule_picture(facts: ReportFacts, room: float = math.inf) -> SchedulePicture:
    """In `room` pixels: every operation of the plan, and from when to when each stage keeps something."""
    found = timed_moments(facts.chain, facts.shown, facts.budget.link)
    names, beside = facts.measurement.names, facts.budget.beside_chain(facts.sequence)
    length, copied = len(facts.chain), tuple(copies(facts, found))
    right = RIGHT + (2 * LANE if copied else 0)
    cell = min(_CELL, (room - LEFT - right) / (length + 1))
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
    moves = facts.shown.moves
    kept = tuple(life for stage, name in enumerate(names) for life in lives(facts.chain, found, stage, name, moves))
    return SchedulePicture(
        cell=cell,
        numbers=(*numbers, (length, "L")),
        kept=kept,
        kinds={each: words for each, words in WORDS.items() if any(life.kind == each for life in kept)},
        copied=copied,
        ran=tuple(ran),
        width=LEFT + cell * (length + 1) + right,
        height=TOP + ROW * len(found) + 8,
    )


def lives(chain: Chain, found: Sequence[Moment], stage: int, name: str, moves: Moves | None = None) -> Iterator[Kept]:
    """Every period in which something is kept for `stage`: its input alone, or what its backward needs."""
    first, now, way, away = 0, "", "kept", False
    for row, moment in enumerate(found):
        if isinstance(moment.operation, ForwardEnable) and moment.operation.stage == stage:
            way = kept_kind(chain.stages[stage], moment.operation.option)
        if moves is not None:
            away = (away or stage in moves.wait_out[row]) and stage not in moves.fetch[row]
        kept = _state(moment, stage, "kept" if way == "elsewhere" and not away else way)
        if kept == now:
            continue
        if now:
            stays = bool(kept) and moment.operation != Backward(stage)
            yield Kept(stage, now, first, row, stays, f"{name}: {WORDS[now]}")
        first, now = row, kept
    if now:
        yield Kept(stage, now, first, len(found) - 1, True, f"{name}: {WORDS[now]}")


def copies(facts: ReportFacts, found: Sequence[Moment]) -> Iterator[Copied]:
    """Every copy of the plan, where the operations are beside which it runs."""
    begins, names = [moment.begin for moment in found], facts.measurement.names

    def row(seconds: float) -> float:
        # While an operation waits for a copy, the picture stands still at its upper edge.
        at = max(0, bisect_right(begins, seconds) - 1)
        share = (seconds - begins[at]) / found[at].seconds if found[at].seconds else 1.0
        return at + min(1.0, share)

    for each in transfers(facts.chain, facts.shown, facts.budget.link):
        way = "out" if each.out else "back"
        title = (
            f"copy {way} of {names[each.stage]}: {format_bytes(each.moved)} in {format_seconds(each.end - each.begin)}"
        )
        yield Copied(0 if each.out else 1, row(each.begin), row(each.end), title)


def _state(moment: Moment, stage: int, way: str) -> str:
    if stage + 1 in moment.attached:
        return way
    return "input" if moment.inputs.get(stage) else ""
