"""The text report: verdict, memory, time, stages, sequence, and use of the plan."""

from __future__ import annotations

import math
import os
import shlex

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotor_cli.facts import Facts
from rotor_py.report.terminal import Prose, parts
from rotor_py.units import format_bytes, format_seconds
from rotor_py.validate.comparison import ComparedStrategy


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


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; if piped, $COLUMNS or 100 columns."""
    width = None
    if not Console(stderr=stderr).is_terminal:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) else 100
    return Console(stderr=stderr, highlight=False, width=width)


def comparison(rows: tuple[ComparedStrategy, ...]) -> Table:
    """One row per strategy: predictions, and measurements if there are any."""
    headings = ["fits", "predicted peak", "time", "overhead"]
    if any(row.verified is not None for row in rows):
        headings = ["fits", "predicted\npeak", "time", "overhead", "measured\npeak", "measured\ntime"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("strategy", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "fits" else "right", no_wrap=True)
    for row in rows:
        fits = Text("yes", style="green") if row.fits else Text("no", style="red")
        cells = [format_bytes(row.peak_bytes), format_seconds(row.step_seconds), f"{row.overhead - 1:+.1%}"]
        if (found := row.verified) is not None:
            cells += [format_bytes(found.measured_peak_bytes), format_seconds(found.measured_step_seconds)]
        table.add_row(row.strategy, fits, *cells, style="" if row.fits else "dim")
    return table
