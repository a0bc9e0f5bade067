"""The report for people: a verdict first, then memory, time, the stages, the sequence, and how to use the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotor_cli.facts import Facts
from rotor_py.units import format_bytes, limit_text
from rotor_solver import Operation, Sequence


def render(facts: Facts, *, saved_plan: str | None = None) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = [verdict(facts), "", amounts(facts), "", stages(facts), "", sequence(facts.sequence)]
    if facts.verified is not None:
        parts += ["", verified(facts)]
    return Group(*parts, "", usage(facts, saved_plan))


def verdict(facts: Facts) -> Text:
    """One sentence: does it fit, and at what price."""
    text = Text()
    text.append(f"{facts.title} fits", style="bold green")
    text.append(
        f" in {format_bytes(facts.mem_limit)} on {facts.device}: predicted peak {format_bytes(facts.peak_bytes)}, "
    )
    plain = facts.store_all_bytes
    if facts.overhead == 1.0 and facts.peak_bytes == plain:
        text.append("nothing has to be recomputed.")
    else:
        text.append(
            f"{facts.overhead - 1:+.1%} time compared with storing everything, which needs {format_bytes(plain)}."
        )
    return text


def amounts(facts: Facts) -> Table:
    """The memory line and the time line."""
    table = Table.grid(padding=(0, 2))
    least = facts.budget.least_bytes()
    memory = (
        ("limit", format_bytes(facts.mem_limit)),
        ("fixed", format_bytes(facts.budget.fixed.total)),
        ("least possible", format_bytes(least)),
        ("store-all", format_bytes(facts.store_all_bytes)),
        ("planned", format_bytes(facts.peak_bytes)),
    )
    time: tuple[tuple[str, str], ...] = (
        ("store-all", format_seconds(facts.store_all_seconds)),
        ("planned", format_seconds(facts.step_seconds)),
        ("overhead", f"{facts.overhead - 1:+.1%}"),
    )
    gap = facts.gap
    if gap is not None:
        time += (("from the optimum", "0 %" if gap < 5e-5 else f"at most {gap:.2%}"),)
    table.add_row(Text("memory", style="bold"), _pairs(memory))
    table.add_row(Text("time", style="bold"), _pairs(time))
    table.add_row(Text("fixed", style="bold"), Text(facts.budget.parts() or "nothing"))
    return table


def _pairs(pairs: Iterable[tuple[str, str]]) -> Text:
    text = Text()
    for index, (name, value) in enumerate(pairs):
        text.append("   " if index else "")
        text.append(name.replace(" ", "\N{NO-BREAK SPACE}") + "\N{NO-BREAK SPACE}", style="dim")
        text.append(value.replace(" ", "\N{NO-BREAK SPACE}"))
    return text


def stages(facts: Facts) -> Table:
    """What every stage costs, and what happens to it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("stage", overflow="fold")
    for heading in ("forward", "backward", "output", "kept", "scratch"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what happens", overflow="fold")
    rows = zip(facts.measurement.names, facts.measurement.stages, facts.actions(), strict=True)
    for name, cost, action in rows:
        table.add_row(
            name,
            format_seconds(cost.forward_seconds),
            format_seconds(cost.backward_seconds),
            format_bytes(cost.activation_bytes),
            format_bytes(cost.saved_bytes),
            format_bytes(max(cost.forward_temp_bytes, cost.backward_temp_bytes, cost.nograd_temp_bytes)),
            Text(action, style="" if action == "stored" else "yellow"),
        )
    return table


def sequence(operations: Sequence) -> Text:
    """The sequence in short notation; runs of one kind are folded to their ends."""
    text = Text("sequence  ", style="bold")
    text.append(", ".join(folded(operations)), style="not bold")
    return text


def folded(operations: Iterable[Operation]) -> Iterator[str]:
    """`Fe_3, Fe_4, Fe_5` becomes `Fe_3…5`; nothing else changes."""
    run: list[Operation] = []
    for operation in operations:
        if run and not _continues(run, operation):
            yield _fold(run)
            run = []
        run.append(operation)
    if run:
        yield _fold(run)


def _continues(run: list[Operation], operation: Operation) -> bool:
    last = run[-1]
    if type(operation) is not type(last) or not hasattr(operation, "stage") or not hasattr(last, "stage"):
        return False
    if getattr(operation, "option", 0) or getattr(last, "option", 0):
        return False
    step = operation.stage - last.stage
    return step in (1, -1) and (len(run) < 2 or step == last.stage - getattr(run[-2], "stage", 0))


def _fold(run: list[Operation]) -> str:
    if len(run) < 3:
        return ", ".join(map(str, run))
    return f"{run[0]}…{str(run[-1]).rpartition('_')[2]}"


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
    text.append(
        f"; plain step {format_bytes(found.plain_peak_bytes)}, {format_seconds(found.plain_step_seconds)}; gradients "
        f"and buffers differ by at most {found.max_grad_difference:g}",
        style="not bold",
    )
    return text


def usage(facts: Facts, saved_plan: str | None) -> Text:
    """The three lines of Python that use the plan."""
    argument = f'mem_limit="{_typed(facts.mem_limit)}"'
    argument = f'plan="{saved_plan}"' if saved_plan else ", ".join([argument, *facts.arguments])
    return Text(
        "use it    from rotor_py import Checkpointable\n"
        f"          model = Checkpointable(model, {argument})\n"
        "          loss(model(batch)).backward()"
    )


def _typed(size: int) -> str:
    """A limit as text that stands for exactly `size` bytes or a little less."""
    text = limit_text(size)
    return text if text != str(size) and size % 10**4 == 0 else str(size)


def format_seconds(seconds: float) -> str:
    """Three significant digits and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        scaled = seconds * factor
        if scaled >= 0.9995 or unit == "µs":
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    raise AssertionError


def console(width: int | None = None, *, stderr: bool = False) -> Console:
    """A console: the terminal's width, or 100 columns where output is piped."""
    found = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return found if found.is_terminal and width is None else Console(stderr=stderr, highlight=False, width=width or 100)
