"""Compute coordinates for two pictures of the page: memory by operation, and when stages run and are stored."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from types import SimpleNamespace

from rotor_py.report.curve_pictures import SCREEN, round_numbers
from rotor_py.report.numbers import NAME, WORDS, OptimizerStep, ReportFacts, kept_kind, optimizer_step
from rotor_py.report.sweep import kind, sentence
from rotor_py.units import format_bytes, format_seconds
from rotor_solver import Backward, Chain, ForwardEnable, Loss, Moment
from rotor_solver.offload import Moves, timed_moments, transfers

HEIGHT, LEFT, TOP, RIGHT = 280, 64, 20, 8
_NARROW, _WIDE = 9, 40  # least width of a column, unless the picture has no room, and greatest width, in pixels
_NEAR = 1.5  # a limit above this multiple of the peak is not drawn: the columns would be too low to read


@dataclass(frozen=True, slots=True)
class Layer:
    """Layer of the memory picture, such as a stage: bytes after each operation, colour, and outline as an SVG path."""

    name: str
    sizes: tuple[int, ...]
    colour: str
    outline: str = ""


def memory_picture(facts: ReportFacts, room: float = SCREEN, most: float = math.inf) -> SimpleNamespace:
    """Return the picture for the template, in pixels: a column per operation, and one for the optimizer step, if any.

    Columns share `room` pixels; if they would be too narrow, the picture may grow to `most` pixels. `limit_y` is None
    if there is no limit, or one far above the peak.

    The height of a column is the simulated memory while its operation runs; without the topmost layer, which the
    operation frees at its end, it is the memory after the operation.
    """
    found, step_after = timed_moments(facts.chain, facts.shown, facts.budget.link), optimizer_step(facts)
    names, beside = facts.measurement.names, facts.budget.beside_chain(facts.sequence)
    sentences = [sentence(moment, names, beside) for moment in found]
    top = beside + max(moment.during for moment in found)
    if step_after is not None:
        sentences.append(f"{NAME}: {format_bytes(step_after.total)} while it runs")
        top = max(top, step_after.total)
    limit = None if facts.mem_limit is None or facts.mem_limit > _NEAR * top else facts.mem_limit
    full = max(top, limit or 0) * 1.04
    step = max((room - LEFT - RIGHT) / len(sentences), min(_NARROW, (most - LEFT - RIGHT) / len(sentences)))
    step = min(_WIDE, step)

    def y(size: float) -> float:
        return TOP + HEIGHT * (1 - size / full)

    below = [0] * len(sentences)
    layers = []
    for layer in layers_of(facts, found, step_after):
        above = [low + size for low, size in zip(below, layer.sizes, strict=True)]
        outline = " ".join(_outline([y(size) for size in below], [y(size) for size in above], step))
        layers.append(replace(layer, outline=outline))
        below = above
    return SimpleNamespace(
        width=LEFT + step * len(sentences) + RIGHT,
        height=HEIGHT + TOP + 8,
        layers=tuple(layer for layer in layers if layer.outline),
        columns=tuple(
            SimpleNamespace(x=LEFT + step * at, width=step, title=f"{words}; {_largest(layers, at)}")
            for at, words in enumerate(sentences)
        ),
        ticks=tuple((y(size), format_bytes(int(size))) for size in round_numbers(0, full, 5)),
        limit_y=None if limit is None else y(limit),
    )


def layers_of(facts: ReportFacts, found: tuple[Moment, ...], step: OptimizerStep | None = None) -> Iterator[Layer]:
    """Yield layers bottom to top: fixed part, input, stages, output, gradients, and bytes freed as an operation ends.

    The `sizes` of a layer are bytes, one for each moment of `found`, and one for the optimizer's `step` if given.
    """
    chain, names = facts.chain, facts.measurement.names
    beside = facts.budget.beside_chain(facts.sequence)

    def layer(name: str, colour: str, sizes: Iterable[int], stepping: int = 0) -> Layer:
        return Layer(name, (*sizes, *(() if step is None else (stepping,))), colour)

    last = step or OptimizerStep(0, 0, 0, 0, 0)
    yield layer("fixed part", "hsl(220 8% 55%)", (beside for _ in found), last.fixed)
    yield layer("input", "hsl(220 8% 70%)", (moment.inputs.get(0, 0) for moment in found), last.input)
    for stage, name in enumerate(names):
        sizes = (moment.inputs.get(stage + 1, 0) + moment.attached.get(stage + 1, 0) for moment in found)
        hue, light = 190 + 130 * stage / max(1, len(chain) - 1), 48 + 14 * (stage % 2)
        yield layer(name, f"hsl({hue:.0f} 55% {light}%)", sizes)
    yield layer("output, held by the caller", "hsl(90 35% 50%)", (moment.output for moment in found), last.output)
    yield layer("gradients", "hsl(145 45% 42%)", (moment.gradients for moment in found), last.gradients)
    freed = (moment.during - moment.after for moment in found)
    yield layer("freed when the operation ends", "hsl(38 90% 58%)", freed, last.scratch)


def _largest(layers: list[Layer], at: int) -> str:
    present = sorted((layer for layer in layers if layer.sizes[at]), key=lambda layer: -layer.sizes[at])
    return "most of it " + ", ".join(f"{layer.name} {format_bytes(layer.sizes[at])}" for layer in present[:4])


def _outline(below: list[float], above: list[float], step: float) -> Iterator[str]:
    """Yield an SVG path around each run of columns in which a layer, between `below` and `above`, is not empty."""
    for filled, run in groupby(range(len(below)), key=lambda at: above[at] < below[at]):  # y grows downwards
        if filled:
            columns = list(run)
            edge = [f"M{LEFT + step * columns[0]:.1f} {below[columns[0]]:.1f}"]
            edge += _stairs([(above[at], LEFT + step * (at + 1)) for at in columns])
            edge += _stairs([(below[at], LEFT + step * at) for at in reversed(columns)])
            yield "".join(edge) + "Z"


def _stairs(steps: list[tuple[float, float]]) -> Iterator[str]:
    """Yield SVG commands of a line with steps (height, x of its end); equal neighbours make one step."""
    for height, run in groupby(steps, key=itemgetter(0)):
        *_, (_, end) = run
        yield f"V{height:.1f}H{end:.1f}"


ROW, LANE = 14, 14
_CELL, _LABEL = 18, 24  # largest width of a stage's column, and least distance between stage numbers, in pixels


def schedule_picture(facts: ReportFacts, room: float = math.inf) -> SimpleNamespace:
    """Return the plan's operations, one in each row, and when each stage is stored, in cells of `cell` by `ROW` pixels.

    `numbers` are the labelled stages, the loss last. `ran` are the operations, with their `sweep.kind`. `copied` are
    the copies of offloaded stages, out (`lane` 0) and back (1), in lanes of `LANE` pixels at the right; `first` and
    `last` are fractional rows. `kinds` maps each `kind` that occurs in `kept` to its words in `WORDS`, for the legend.
    """
    found = timed_moments(facts.chain, facts.shown, facts.budget.link)
    names, beside = facts.measurement.names, facts.budget.beside_chain(facts.sequence)
    length, copied = len(facts.chain), tuple(copies(facts, found))
    right = RIGHT + (2 * LANE if copied else 0)
    cell = min(_CELL, (room - LEFT - right) / (length + 1))
    every = max(5, 5 * math.ceil(_LABEL / (5 * cell)))
    numbers = [(stage, str(stage)) for stage in range(0, length, every) if (length - stage) * cell >= _LABEL / 2]
    ran = []
    for row, moment in enumerate(found):
        column = length if isinstance(moment.operation, Loss) else moment.operation.stage
        text, title = str(moment.operation), sentence(moment, names, beside)
        ran.append(SimpleNamespace(column=column, row=row, kind=kind(moment), text=text, title=title))
    moves = facts.shown.moves
    kept = tuple(life for stage, name in enumerate(names) for life in lives(facts.chain, found, stage, name, moves))
    return SimpleNamespace(
        cell=cell,
        numbers=(*numbers, (length, "L")),
        kept=kept,
        kinds={each: words for each, words in WORDS.items() if any(life.kind == each for life in kept)},
        copied=copied,
        ran=ran,
        width=LEFT + cell * (length + 1) + right,
        height=TOP + ROW * len(found) + 8,
    )


def lives(
    chain: Chain, found: Sequence[Moment], stage: int, name: str, moves: Moves | None = None
) -> Iterator[SimpleNamespace]:
    """Yield the rows in which a stage is stored as `kind`, a key of `WORDS`; `last` frees it, unless it `stays`."""

    kinds, way, away = [], "kept", False
    for row, moment in enumerate(found):
        if isinstance(moment.operation, ForwardEnable) and moment.operation.stage == stage:
            way = kept_kind(chain.stages[stage], moment.operation.option)
        if moves is not None:
            away = (away or stage in moves.wait_out[row]) and stage not in moves.fetch[row]
        kept = "input" if moment.inputs.get(stage) else ""
        if stage + 1 in moment.attached:
            kept = "kept" if way == "elsewhere" and not away else way
        kinds.append(kept)
    end = 0
    for now, run in groupby(kinds):
        first, end = end, end + len(list(run))
        if now:
            freed = end < len(found)  # by the operation of the row `end`
            stays = not freed or (bool(kinds[end]) and found[end].operation != Backward(stage))
            last, title = end if freed else end - 1, f"{name}: {WORDS[now]}"
            yield SimpleNamespace(stage=stage, kind=now, first=first, last=last, stays=stays, title=title)


def copies(facts: ReportFacts, found: Sequence[Moment]) -> Iterator[SimpleNamespace]:
    begins, names = [moment.begin for moment in found], facts.measurement.names

    def row(seconds: float) -> float:
        # A row's height stands for its operation's time; a wait for a copy before it falls on the upper edge.
        at = max(0, bisect_right(begins, seconds) - 1)
        share = (seconds - begins[at]) / found[at].seconds if found[at].seconds else 1.0
        return at + min(1.0, share)

    for each in transfers(facts.chain, facts.shown, facts.budget.link):
        way = "out" if each.out else "back"
        cost = f"{format_bytes(each.moved)} in {format_seconds(each.end - each.begin)}"
        title = f"copy {way} of {names[each.stage]}: {cost}"
        yield SimpleNamespace(lane=0 if each.out else 1, first=row(each.begin), last=row(each.end), title=title)
