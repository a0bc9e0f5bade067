"""A step function as lines of text."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

LINE, FILL = "●", "·"
LEFTWARDS, RIGHTWARDS, UPWARDS, DOWNWARDS = ARROWS = "←→↑↓"
_LABEL = 8
"""Characters for the labels on the left."""


def chart(
    curve: Sequence[tuple[float, float]],
    marks: Sequence[tuple[str, float, float]],
    *,
    width: int,
    height: int,
    top: str,
    ends: tuple[str, str],
) -> list[str]:
    """Lines of at most `width` characters, for a curve of (x, y), x increasing and y decreasing to the least.

    From every x to the next the curve is at its y. `marks` are (letter, x, y), and every one is drawn: where there is a
    letter already, the next stands beside it; one that lies outside stands at the edge, with an arrow to where it is.
    `top` labels the largest y, `ends` the least and the largest x. The least y is 0.
    """
    columns, highest = width - _LABEL - 2, max(y for _, y in curve)
    left, right = curve[0][0], curve[-1][0]
    starts = [x for x, _ in curve]

    def row_of(y: float) -> int:
        return height - 1 - round(y / highest * (height - 1)) if highest else height - 1

    def column_of(x: float) -> int:
        return round((x - left) / (right - left) * (columns - 1)) if right > left else 0

    cells = [[" "] * columns for _ in range(height)]
    before = None
    for column in range(columns):
        x = right if column == columns - 1 else left + (right - left) * column / (columns - 1)
        row = row_of(curve[bisect.bisect_right(starts, x) - 1][1])
        # Steps are joined by dots, or points in neighbouring columns would not look like one curve.
        for between in range(row if before is None else before + 1, row):
            cells[between][column] = FILL
        cells[row][column] = LINE
        before = row
    for letter, x, y in marks:
        inside = min(max(x, left), right), min(max(y, 0), highest)
        sideways = LEFTWARDS * (x < left), RIGHTWARDS * (x > right)
        text = sideways[0] + letter + sideways[1] + UPWARDS * (y > highest) + DOWNWARDS * (y < 0)
        _write(cells, row_of(inside[1]), column_of(inside[0]), text)
    labels = [top, *[""] * (height - 2), "0 %"]
    lines = [f"{label:>{_LABEL}} │{''.join(row)}".rstrip() for label, row in zip(labels, cells, strict=True)]
    gap = columns - len(ends[0]) - len(ends[1])
    return [*lines, f"{'':{_LABEL}} └{'─' * columns}", f"{'':{_LABEL}}  {ends[0]}{' ' * gap}{ends[1]}"]


def _write(cells: list[list[str]], row: int, column: int, text: str) -> None:
    """Write `text` where it covers no other, as near to the place as it can be: first to the right in its own row."""
    height, columns = len(cells), len(cells[0])
    places = itertools.product(range(height), range(columns - len(text) + 1))
    for found, begin in sorted(places, key=lambda at: (abs(at[0] - row), at[1] < column, abs(at[1] - column))):
        if all(cell in (" ", LINE, FILL) for cell in cells[found][begin : begin + len(text)]):
            cells[found][begin : begin + len(text)] = text
            return
