"""The report for people: a verdict first, then memory, time, the stages, the sequence, and how to use the plan."""

from __future__ import annotations

import os

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotor_cli.facts import Facts
from rotor_py.report.terminal.prose import Prose
from rotor_py.report.terminal.text import parts
from rotor_py.units import format_bytes, format_seconds, limit_text


def render(facts: Facts, *, saved_plan: str | None = None) -> RenderableType:
    """The whole report."""
    shown = parts(facts)
    if facts.verified is not None:
        shown += ["", Prose(verified(facts))]
    return Group(*shown, "", usage(facts, saved_plan))


def verified(facts: Facts) -> Text:
    """What a real step showed, beside what was predicted."""
    found = facts.verified
    assert found is not None
    text = Text("verified  ", style="bold")
    share = found.measured_peak_bytes / facts.peak_bytes
    text.append(
        f"measured peak {format_bytes(found.measured_peak_bytes)} ({share:.1%} of the prediction), "
        f"measured time {format_seconds(found.measured_step_seconds)}",
        style="not bold",
    )
    if found.plain_step_seconds is None or found.plain_peak_bytes is None or found.max_grad_difference is None:
        text.append(
            "; the plain step does not fit into this device, so nothing could be compared with it", style="not bold"
        )
        return text
    plain, beside = "plain step", ""
    if found.eager_difference is not None:
        plain = "the compiled step that stores everything"
        beside = f", and those of the model uncompiled by {found.eager_difference:g}"
    text.append(
        f"; {plain} {format_bytes(found.plain_peak_bytes)}, {format_seconds(found.plain_step_seconds)}; gradients "
        f"and buffers differ by at most {found.max_grad_difference:g}{beside}",
        style="not bold",
    )
    return text


def usage(facts: Facts, saved_plan: str | None) -> Table:
    """The three lines of Python that use the plan; a line that is too long goes on below, as Python allows it."""
    argument = f'mem_limit="{_typed(facts.mem_limit)}"'
    argument = f'plan="{saved_plan}"' if saved_plan else ", ".join([argument, *facts.arguments])
    table = Table.grid(padding=(0, 4, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    code = f"model = Checkpointable(model, {argument})"
    table.add_row("use it", Text(f"from rotor_py import Checkpointable\n{code}\nloss(model(batch)).backward()"))
    return table


def _typed(size: int) -> str:
    """A limit as text that stands for exactly `size` bytes or a little less."""
    text = limit_text(size)
    return text if text != str(size) and size % 10**4 == 0 else str(size)


def console(width: int | None = None, *, stderr: bool = False) -> Console:
    """A console: the terminal's width; where output is piped, $COLUMNS, and without that 100 columns."""
    found = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if found.is_terminal and width is None:
        return found
    columns = os.environ.get("COLUMNS", "")
    width = width or (int(columns) if columns.isdecimal() and int(columns) else 100)
    return Console(stderr=stderr, highlight=False, width=width)
