"""A plan for a pipeline, for people and as data."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotor_cli.pipeline_facts import PipelineFacts
from rotor_cli.reporters.json_report import SCHEMA
from rotor_py.report.terminal.prose import Prose
from rotor_py.units import format_bytes, format_seconds
from rotor_solver.pipeline import Part, PipelinePlan


def render_pipeline(facts: PipelineFacts) -> RenderableType:
    """The verdict, what equal cuts cost, a line for every part, and their sequences."""
    return Group(
        Prose(_verdict(facts)),
        "",
        Prose(_compared(facts)),
        "",
        _parts(facts),
        "",
        *(Prose(_sequence(facts, part)) for part in facts.plan.parts),
    )


def _verdict(facts: PipelineFacts) -> Text:
    plan = facts.plan
    schedule, line = plan.schedule, plan.timeline
    share = plan.slowest_seconds * schedule.ranks / facts.stored_seconds - 1 if facts.stored_seconds else 0.0
    limits = sorted({*plan.limits})
    within = " or ".join(format_bytes(limit) for limit in limits) if len(limits) < 3 else "their limits"
    text = Text(f"{facts.title} fits on {schedule.ranks} ranks", style="bold")
    text.append(
        f" in {within} each on {facts.device}, {schedule.microbatches} microbatches like the sample in the schedule "
        f"{schedule.name}: "
        f"the slowest rank takes {format_seconds(plan.slowest_seconds)} for a microbatch, {share:+.1%} compared with "
        f"an equal part of storing everything. A step takes {format_seconds(line.makespan)}, of which ranks wait "
        f"{line.bubble:.1%}.",
        style="not bold",
    )
    return text


def _compared(facts: PipelineFacts) -> Text:
    text = Text("equal cuts  ", style="bold")
    best = facts.best_equal
    if best is None:
        least = min(facts.equal, key=lambda each: max(_excess(each.plan)))
        rank = max(range(len(least.plan.limits)), key=lambda each: _excess(least.plan)[each])
        return text.append(
            f"no policy that is the same for all ranks fits: the one that needs least ({least.policy}) takes "
            f"{format_bytes(least.plan.timeline.peaks[rank])} on rank {rank}",
            style="not bold",
        )
    return text.append(
        f"the fastest policy that fits ({best.policy}, on all ranks) takes "
        f"{format_seconds(best.plan.timeline.makespan)} for a step, {facts.ratio or 1.0:.2f} times as long",
        style="not bold",
    )


def _excess(plan: PipelinePlan) -> list[int]:
    """By how much each rank passes its limit."""
    return [peak - limit for peak, limit in zip(plan.timeline.peaks, plan.limits, strict=True)]


def _parts(facts: PipelineFacts) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("rank", "stages", "in flight", "peak", "fixed", "kept", "time", "recomputed"):
        table.add_column(heading, justify="left" if heading == "stages" else "right", no_wrap=heading != "stages")
    for part in facts.plan.parts:
        one = part.microbatch
        table.add_row(
            str(part.rank),
            _stages(facts, part),
            str(part.flying.forwards + part.flying.weights),
            format_bytes(part.peak_bytes),
            format_bytes(part.fixed_bytes),
            format_bytes(one.kept_bytes),
            format_seconds(one.seconds),
            f"{facts.recomputed(part):+.1%}",
        )
    return table


def _stages(facts: PipelineFacts, part: Part) -> str:
    first, last = facts.names[part.begin], facts.names[part.end - 1]
    return f"{part.begin}–{part.end - 1}: {first} … {last}" if part.end - part.begin > 1 else f"{part.begin}: {first}"


def _sequence(facts: PipelineFacts, part: Part) -> Text:
    where = f"rank {part.rank}, from stage {part.begin}" if part.begin else f"rank {part.rank}"
    return Text.assemble((f"{where}  ", "bold"), str(part.sequence))


def pipeline_json(facts: PipelineFacts) -> dict[str, Any]:
    """What `--json` writes: seconds and bytes, as the keys say. Sequences number the stages of a part from 0."""
    plan = facts.plan
    best = facts.best_equal
    return {
        "schema": SCHEMA,
        "device": facts.device,
        "pipeline": {
            "schedule": plan.schedule.name,
            "ranks": plan.schedule.ranks,
            "microbatches": plan.schedule.microbatches,
            "virtual_stages": plan.schedule.virtual_stages,
            "cuts": list(plan.cuts),
            "microbatch_seconds": plan.slowest_seconds,
            "lower_bound_seconds": plan.lower_bound,
            "step_seconds": plan.timeline.makespan,
            "bubble": plan.timeline.bubble,
            "by_rank": [
                {"rank": rank, "mem_limit": limit, "peak_bytes": peak}
                for rank, (limit, peak) in enumerate(zip(plan.limits, plan.timeline.peaks, strict=True))
            ],
            "parts": [_part(facts, part) for part in plan.parts],
        },
        "equal_cuts": None
        if best is None
        else {
            "policy": best.policy,
            "cuts": list(best.plan.cuts),
            "microbatch_seconds": best.plan.slowest_seconds,
            "step_seconds": best.plan.timeline.makespan,
            "ratio": facts.ratio,
        },
    }


def _part(facts: PipelineFacts, part: Part) -> dict[str, Any]:
    one = part.microbatch
    return {
        "rank": part.rank,
        "first_stage": part.begin,
        "last_stage": part.end - 1,
        "names": list(facts.names[part.begin : part.end]),
        "microbatches_in_flight": part.flying.forwards,
        "microbatches_waiting_for_weights": part.flying.weights,
        "peak_bytes": part.peak_bytes,
        "fixed_bytes": part.fixed_bytes,
        "kept_bytes": one.kept_bytes,
        "forward_seconds": one.forward_seconds,
        "backward_seconds": one.backward_seconds,
        "sequence": str(part.sequence),
    }
