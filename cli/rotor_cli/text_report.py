"""The text report: verdict, memory, time, stages, sequence, and use of the plan."""

from __future__ import annotations

import math
import os
import shlex

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rotor_cli.facts import Facts
from rotor_py.report.terminal import Prose, broken, parts
from rotor_py.units import format_bytes, format_seconds
from rotor_py.validate.comparison import ComparedStrategy

_ANY = 10**4
"""Width in characters beyond any table."""


def render(facts: Facts, *, saved_plan: str | None = None) -> RenderableType:
    shown = parts(facts)
    if facts.verified is not None:
        shown += ["", Prose(verified(facts))]
    table = Table.grid(padding=(0, 4, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("use it", Text(usage_lines(facts, saved_plan)))
    return Group(*shown, "", table)


def verified(facts: Facts) -> Text:
    found = facts.verified
    assert found is not None
    share = found.measured_peak_bytes / facts.peak_bytes
    said = (
        f"measured peak {format_bytes(found.measured_peak_bytes)} ({share:.1%} of the prediction), "
        f"measured time {format_seconds(found.measured_step_seconds)}"
    )
    if found.plain_step_seconds is None or found.plain_peak_bytes is None or found.max_grad_difference is None:
        said += "; the plain step does not fit into this device, so nothing could be compared with it"
    else:
        overhead = found.measured_step_seconds / found.plain_step_seconds - 1
        other, step, beside = "plain", "plain step", ""
        if found.eager_difference is not None:
            other, step = "compiled, storing everything", "that step"
            beside = f", and those of the model uncompiled by {found.eager_difference:g}"
        compared = "parameters after the step" if facts.budget.freed_gradients else "gradients"
        differ = f"{compared} and buffers differ by at most {found.max_grad_difference:g}{beside}"
        if (rounded := found.rounded) is not None:
            error = f"{rounded.gradient_error:.2g} of their length"
            differ = f"with what is kept in {rounded.word}, {compared} differ by {error}{beside}"
        said += (
            f", {overhead:+.1%} over {other} ({facts.overhead - 1:+.1%} predicted); {step} "
            f"{format_bytes(found.plain_peak_bytes)}, {format_seconds(found.plain_step_seconds)}; {differ}"
        )
    text = Text.assemble(("verified  ", "bold"), said)
    if found.loss is not None and not math.isfinite(found.loss):
        text.append(f"; the loss is {found.loss}, so equal gradients say little", style="bold red")
    return text


def usage_lines(facts: Facts, saved_plan: str | None) -> str:
    """Three lines of Python that use the plan, from the file `saved_plan` if there is one."""
    argument, others = f"mem_limit={typed(facts.mem_limit, facts.peak_bytes)}", facts.arguments
    if saved_plan:  # options that a plan file omits: tier, low-precision format, optimizer
        again = ("step_in_backward=", "keep=", *(("offload=",) if facts.sequence.moves is not None else ()))
        others = tuple(each for each in others if each.startswith(again))
        argument = f'plan="{saved_plan}"'
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
        lines += f"\n# or as it is: {shlex.join([*command, *(('--', *taken.arguments) if taken.arguments else ())])}"
    return lines


def typed(limit: int, peak: int) -> str:
    """A limit as Python writes it: exactly, or rounded if that leaves room for the plan."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if limit >= 10**power:
            hundredths = limit * 100 // 10**power
            if peak <= hundredths * 10**power // 100:
                return f'"{hundredths / 100:.2f}'.rstrip("0").rstrip(".") + f'{unit}"'
    return f"{limit:_}"


def console(width: int | None = None, *, stderr: bool = False) -> Console:
    """A console as wide as the terminal; if piped, $COLUMNS or 100 columns."""
    if width is None and not Console(stderr=stderr).is_terminal:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) else 100
    return Console(stderr=stderr, highlight=False, width=width)


class Comparison:
    """One row per strategy: predictions, and measurements if there are any.

    A narrow terminal shows measurements in a second table.
    """

    def __init__(self, rows: tuple[ComparedStrategy, ...]) -> None:
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def excess(table: Table) -> int:
            return Measurement.get(console, options.update(max_width=_ANY), table).maximum - options.max_width

        measured = tuple(row for row in self.rows if row.verified is not None)
        whole = _table(self.rows, " ", predicted=True, measured=bool(measured))
        if excess(whole) <= 0:
            yield whole
            return
        longest = max(len(row.strategy) for row in self.rows)
        names = longest - max(0, excess(_table(self.rows, "\n", predicted=True, measured=False)))
        yield _table(self.rows, "\n", names, predicted=True, measured=False)
        if measured:
            yield ""
            yield _table(measured, "\n", names, predicted=False, measured=True)


def _table(
    rows: tuple[ComparedStrategy, ...], gap: str, names: int = _ANY, *, predicted: bool, measured: bool
) -> Table:
    """A table with names of at most `names` characters per line, and words of headings `gap` apart."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("strategy")
    headings = ["fits", f"predicted{gap}peak", "time", "overhead"] if predicted else []
    headings += [f"measured{gap}peak", f"measured{gap}time"] if measured else []
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "fits" else "right", no_wrap=True)
    for row in rows:
        cells: list[str | Text] = []
        if predicted:
            fits = Text("yes", style="green") if row.fits else Text("no", style="red")
            cells += [fits, format_bytes(row.peak_bytes), format_seconds(row.step_seconds), f"{row.overhead - 1:+.1%}"]
        if measured and (found := row.verified) is not None:
            cells += [format_bytes(found.measured_peak_bytes), format_seconds(found.measured_step_seconds)]
        table.add_row("\n".join(broken(row.strategy, max(1, names))), *cells, style="" if row.fits else "dim")
    return table
