"""Text that `rotor-plan` prints: the report, Python lines that use the plan, a table of strategies, and charts."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import shlex
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotor_cli.facts import Facts
from rotor_py.report.sweep import USUAL, BatchChoice, Sweep, format_rate, format_share, saving
from rotor_py.report.terminal import Prose, parts, plain_table
from rotor_py.units import format_bytes, format_seconds
from rotor_py.validate.comparison import ComparedStrategy
from rotor_py.validate.verification import Verification


def render(facts: Facts, *, saved_plan: str | None = None) -> RenderableType:
    shown = parts(facts)
    if facts.verified is not None:
        shown += ["", Prose(verified(facts, facts.verified))]
    table = Table.grid(padding=(0, 4, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("use it", Text(usage_lines(facts, saved_plan)))
    return Group(*shown, "", table)


def verified(facts: Facts, found: Verification) -> Text:
    said = (
        f"measured peak {format_bytes(found.measured_peak_bytes)} ({found.measured_peak_bytes / facts.peak_bytes:.1%} "
        f"of the prediction), measured time {format_seconds(found.measured_step_seconds)}"
    )
    if found.plain_step_seconds is None or found.plain_peak_bytes is None or found.max_grad_difference is None:
        said += "; the plain step does not fit this device, so there is nothing to compare with"
    else:
        overhead = found.measured_step_seconds / found.plain_step_seconds - 1
        other, step, beside = "plain", "plain step", ""
        if found.eager_difference is not None:
            other, step = "compiled, storing everything", "that step"
            beside = f", and from the uncompiled model by {found.eager_difference:g}"
        compared = "parameters after the step" if facts.budget.freed_gradients else "gradients"
        differ = f"{compared} and buffers differ by at most {found.max_grad_difference:g}{beside}"
        if (rounded := found.rounded) is not None:
            error = f"{rounded.gradient_error:.2g} of their norm"
            differ = f"with activations kept in {rounded.word}, {compared} differ by {error}{beside}"
        said += (
            f", {overhead:+.1%} over {other} ({facts.overhead - 1:+.1%} predicted); {step} "
            f"{format_bytes(found.plain_peak_bytes)}, {format_seconds(found.plain_step_seconds)}; {differ}"
        )
    text = Text.assemble(("verified  ", "bold"), said)
    if found.loss is not None and not math.isfinite(found.loss):
        text.append(f"; the loss is {found.loss}, so equal gradients say little", style="bold red")
    return text


def usage_lines(facts: Facts, saved_plan: str | None) -> str:
    """Return Python lines that train by the plan, which they make again or, if given, read from `saved_plan`."""
    argument, others = f"mem_limit={typed(facts.mem_limit, facts.peak_bytes)}", facts.arguments
    if saved_plan:  # keep arguments that a plan file lacks: offload folder, rounding format, optimizer
        again = ("step_in_backward=", "keep=", *(("offload=",) if facts.sequence.moves is not None else ()))
        others = tuple(each for each in others if each.startswith(again))
        argument = f"plan={json.dumps(saved_plan, ensure_ascii=False)}"
    argument = ", ".join([argument, *others])
    step = "loss(model(batch)).backward()"
    if (chosen := facts.batches) is not None:
        steps = chosen.accumulation_steps
        step += f"  # {chosen.batch} samples" + (f", and optimizer.step() after every {steps}" if steps > 1 else "")
    lines = f"from rotor_py import Checkpointable\nmodel = Checkpointable(model, {argument})\n{step}"
    if (taken := facts.taken) is not None:
        limit = typed(facts.mem_limit, facts.peak_bytes).strip('"')
        command = ["rotor-plan", taken.script, "--mem-limit", limit, "--run"]
        command += ["--offload", facts.budget.link_name] if facts.budget.link is not None else []
        command += ["--" + each.replace('"', "") for each in facts.arguments if each.startswith("keep=")]
        lines += f"\n# or run: {shlex.join([*command, *(('--', *taken.arguments) if taken.arguments else ())])}"
    return lines


def typed(limit: int, peak: int) -> str:
    """Write a limit in Python: "1.23GB", rounded down, if `peak` bytes still fit in it; else its number of bytes."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if limit >= 10**power:
            hundredths = limit * 100 // 10**power
            if peak <= hundredths * 10**power // 100:
                return f'"{hundredths / 100:.2f}'.rstrip("0").rstrip(".") + f'{unit}"'
    return f"{limit:_}"


def console(*, stderr: bool = False) -> Console:
    """Return a rich console as wide as the terminal; if output is piped, as wide as $COLUMNS says, or 100 columns."""
    found, columns = Console(stderr=stderr, highlight=False), os.environ.get("COLUMNS", "")  # which rich reads
    if not found.is_terminal and not (columns.isdecimal() and int(columns)):
        found.width = 100
    return found


def comparison(rows: tuple[ComparedStrategy, ...]) -> Table:
    headings = ["fits", "predicted peak", "time", "overhead"]
    if any(row.verified is not None for row in rows):
        headings = ["fits", "predicted\npeak", "time", "overhead", "measured\npeak", "measured\ntime"]
    table = plain_table("strategy", *headings, left=("fits",), folded=("strategy",))
    for row in rows:
        fits = Text("yes", style="green") if row.fits else Text("no", style="red")
        cells = [format_bytes(row.peak_bytes), format_seconds(row.step_seconds), f"{row.overhead - 1:+.1%}"]
        if (found := row.verified) is not None:
            cells += [format_bytes(found.measured_peak_bytes), format_seconds(found.measured_step_seconds)]
        table.add_row(row.strategy, fits, *cells, style="" if row.fits else "dim")
    return table


# Charts: time by memory limit, and samples per second by batch size.


_HEIGHT, _WIDEST = 14, 100


def curve(sweep: Sweep, title: str, width: int, overhead: float | None = None) -> RenderableType:
    points = sweep.points
    shown: list[RenderableType] = [Prose(f"{title}: {saving(sweep, USUAL if overhead is None else overhead)}")]
    if len(points) > 1:
        lines = chart(
            [(point.mem_limit, point.overhead - 1) for point in points],
            [(letter, point.mem_limit, point.overhead - 1) for letter, point in sweep.lettered()],
            width=min(width, _WIDEST),
            height=_HEIGHT,
            top=format_share(points[0].overhead - 1),
            ends=(format_bytes(points[0].mem_limit), format_bytes(points[-1].mem_limit)),
        )
        outside = any(arrow in line for line in lines for arrow in ARROWS)
        arrows = "; arrows: outside the chart" if outside else ""
        shown += ["", *_drawn(f"more time, by the limit of the whole step{arrows}", lines)]
    legend = plain_table("", "at its least", "peak", "overhead", left=("",), folded=("at its least",))
    for letter, point in sweep.lettered():
        legend.add_row(letter, point.name, format_bytes(point.mem_limit), f"{point.overhead - 1:+.1%}")
    return Group(*shown, "", legend)


def _drawn(caption: str, lines: list[str]) -> tuple[Text, Text]:
    return Text(caption, style="dim"), Text("\n".join(lines), no_wrap=True)


LINE, FILL = "●", "·"
LEFTWARDS, RIGHTWARDS, UPWARDS, DOWNWARDS = ARROWS = "←→↑↓"
_LABEL = 8  # width of the labels of the vertical axis, in characters


def chart(
    curve: Sequence[tuple[float, float]],
    marks: Sequence[tuple[str, float, float]],
    *,
    width: int,
    height: int,
    top: str,
    ends: tuple[str, str],
) -> list[str]:
    """Return a chart of a step function: `height` lines of at most `width` characters, and two lines for the x axis.

    `curve` has points (x, y) with increasing x and decreasing y; y is constant up to the next x. `marks` has triples
    (letter, x, y). A letter is drawn next to (x, y) if other letters are there, and with an arrow at the edge if (x, y)
    is outside. The y axis begins at 0. `top` labels the largest y, `ends` the least and the largest x.
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
        # Where y falls from one column to the next, dots connect the two points.
        for between in range(row if before is None else before + 1, row):
            cells[between][column] = FILL
        cells[row][column] = LINE
        before = row
    for letter, x, y in marks:
        inside = min(max(x, left), right), min(max(y, 0), highest)
        sideways = LEFTWARDS * (x < left), RIGHTWARDS * (x > right)
        text = sideways[0] + letter + sideways[1] + UPWARDS * (y > highest) + DOWNWARDS * (y < 0)
        _write(cells, row_of(inside[1]), column_of(inside[0]), text)
    return _with_axes(cells, (top, "0 %"), ends)


def _with_axes(cells: list[list[str]], heights: tuple[str, str], ends: tuple[str, str]) -> list[str]:
    columns = len(cells[0])
    labels = [heights[0], *[""] * (len(cells) - 2), heights[1]]
    return [
        *(f"{label:>{_LABEL}} │{''.join(row)}".rstrip() for label, row in zip(labels, cells, strict=True)),
        f"{'':{_LABEL}} └{'─' * columns}",
        f"{'':{_LABEL}}  {ends[0]}{ends[1]:>{columns - len(ends[0])}}",
    ]


def _write(cells: list[list[str]], row: int, column: int, text: str) -> None:
    """Write `text` into free cells in the row nearest to `row`, from `column` on to the right if possible."""
    height, columns = len(cells), len(cells[0])
    places = itertools.product(range(height), range(columns - len(text) + 1))
    for found, begin in sorted(places, key=lambda at: (abs(at[0] - row), at[1] < column, abs(at[1] - column))):
        if all(cell in (" ", LINE, FILL) for cell in cells[found][begin : begin + len(text)]):
            cells[found][begin : begin + len(text)] = text
            return


_BATCH_HEIGHT = 12
PLANNED, STORED, CHOSEN = "●", "○", "◆"


def batches(choice: BatchChoice, width: int) -> RenderableType:
    """Return a chart of samples per second by batch size, with a logarithmic axis of batch sizes."""
    caption = f"samples a second by the batch: {PLANNED} by the fastest plan, {STORED} storing everything, "
    return Group(*_drawn(f"{caption}{CHOSEN} this batch", batch_chart(choice, min(width, _WIDEST))))


def batch_chart(choice: BatchChoice, width: int) -> list[str]:
    points, columns = choice.points, width - _LABEL - 2
    first, last = math.log(points[0].batch), math.log(points[-1].batch)
    highest = max(max(point.samples_per_second, point.stored_per_second or 0.0) for point in points)
    cells = [[" "] * columns for _ in range(_BATCH_HEIGHT)]
    # Later marks cover earlier ones: where storing everything fits, it is the fastest plan, and ○ covers its ●.
    marks = [
        *((point.batch, point.samples_per_second, PLANNED) for point in points),
        *((point.batch, point.stored_per_second, STORED) for point in points if point.stored_per_second is not None),
        (choice.batch, choice.samples_per_second, CHOSEN),
    ]
    for batch, rate, sign in marks:
        share = (math.log(batch) - first) / (last - first) if last > first else 0.0
        cells[_BATCH_HEIGHT - 1 - round(rate / highest * (_BATCH_HEIGHT - 1))][round(share * (columns - 1))] = sign
    return _with_axes(cells, (format_rate(highest), "0"), (str(points[0].batch), str(points[-1].batch)))
