"""The memory of a step by operation, as shapes: a layer for each owner, stacked, and the limit as a line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rotor_py.report.facts import ReportFacts
from rotor_py.report.html.axis import SCREEN, Column, round_numbers
from rotor_py.report.optimizer_step import OptimizerStep, optimizer_step
from rotor_py.report.wording import sentence
from rotor_py.units import format_bytes
from rotor_solver import Moment
from rotor_solver.moving import timed_moments

HEIGHT, LEFT, TOP, RIGHT = 280, 64, 12, 8
_NARROW, _WIDE = 9, 40
"""Pixels: the width of a column, where there is room for it, and the largest one."""
_NEAR = 1.5
"""A limit above this multiple of the peak is not drawn: it would flatten everything else. The number is a guess."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one owner has in memory: bytes after every operation, the colour, and the outline in the picture."""

    name: str
    sizes: tuple[int, ...]
    colour: str
    outline: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPicture:
    """In pixels. `limit_y` is None where the limit is far above the peak, or there is none."""

    width: float
    height: int
    layers: tuple[Layer, ...]
    columns: tuple[Column, ...]
    ticks: tuple[tuple[float, str], ...]
    limit_y: float | None


def memory_picture(facts: ReportFacts, room: float = SCREEN, most: float = math.inf) -> MemoryPicture:
    """One column for each operation, and one for the optimizer's step, where an optimizer is known.

    They share `room` pixels; where they are too many for that, the picture may be up to `most` pixels wide.

    Without the topmost layer, a column adds up to the simulated memory after its operation; with it, to the memory
    while the operation runs.
    """
    found, step_after = timed_moments(facts.chain, facts.shown, facts.budget.link), optimizer_step(facts)
    names, beside = facts.measurement.names, facts.budget.beside_chain(facts.sequence)
    sentences = [sentence(moment, names, beside) for moment in found]
    top = beside + max(moment.during for moment in found)
    if step_after is not None:
        sentences.append(step_after.sentence)
        top = max(top, step_after.total)
    limit = facts.mem_limit
    near = limit is not None and limit <= _NEAR * top
    full = max(top, limit if near and limit is not None else 0) * 1.04
    step = max((room - LEFT - RIGHT) / len(sentences), min(_NARROW, (most - LEFT - RIGHT) / len(sentences)))
    step = min(_WIDE, step)

    def y(size: float) -> float:
        return TOP + HEIGHT * (1 - size / full)

    below = [0] * len(sentences)
    layers = []
    for layer in layers_of(facts, found, step_after):
        above = [low + size for low, size in zip(below, layer.sizes, strict=True)]
        outline = " ".join(_outline([y(size) for size in below], [y(size) for size in above], step))
        layers.append(Layer(layer.name, layer.sizes, layer.colour, outline))
        below = above
    return MemoryPicture(
        width=LEFT + step * len(sentences) + RIGHT,
        height=HEIGHT + TOP + 8,
        layers=tuple(layer for layer in layers if layer.outline),
        columns=tuple(
            Column(LEFT + step * at, step, f"{words}; {_largest(layers, at)}") for at, words in enumerate(sentences)
        ),
        ticks=tuple((y(size), format_bytes(int(size))) for size in round_numbers(0, full, 5)),
        limit_y=y(limit) if near and limit is not None else None,
    )


def layers_of(facts: ReportFacts, found: tuple[Moment, ...], step: OptimizerStep | None = None) -> Iterator[Layer]:
    """From the bottom to the top: the fixed part, the chain's input, stages, the output, gradients, and the rest.

    A layer has one size for each moment, in bytes, and one more for the optimizer's `step`, if there is one.
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
    """The owners of the most memory in one column, in words."""
    present = sorted((layer for layer in layers if layer.sizes[at]), key=lambda layer: -layer.sizes[at])
    return "most of it " + ", ".join(f"{layer.name} {format_bytes(layer.sizes[at])}" for layer in present[:4])


def _outline(below: list[float], above: list[float], step: float) -> Iterator[str]:
    """Closed lines around every run of columns in which the layer has a height."""
    start = 0
    while start < len(below):
        end = start
        while end < len(below) and above[end] < below[end]:  # y grows downwards
            end += 1
        if end > start:
            columns = range(start, end)
            edge = [f"M{LEFT + step * start:.1f} {below[start]:.1f}"]
            edge += _stairs([above[at] for at in columns], [LEFT + step * (at + 1) for at in columns])
            edge += _stairs([below[at] for at in reversed(columns)], [LEFT + step * at for at in reversed(columns)])
            yield "".join(edge) + "Z"
        start = max(end, start + 1)


def _stairs(heights: list[float], ends: list[float]) -> Iterator[str]:
    """Steps from height to height, each as long as its column; neighbours of one height make one line."""
    for at, (height, end) in enumerate(zip(heights, ends, strict=True)):
        if at == 0 or height != heights[at - 1]:
            yield f"V{height:.1f}"
        if at + 1 == len(heights) or heights[at + 1] != height:
            yield f"H{end:.1f}"
