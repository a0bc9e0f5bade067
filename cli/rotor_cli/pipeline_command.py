"""Run --pipeline: measure a microbatch, cut the model for the ranks, plan each part, and compare with equal cuts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from rotor_cli.failure import INFEASIBLE, Failure, failed, kind_of, usage, user_code
from rotor_cli.model_file import ModelFile, load
from rotor_cli.request import Request
from rotor_cli.target_device import Target, device_of, limit_on
from rotor_cli.text_report import console
from rotor_cli.write_outputs import SCHEMA, picked
from rotor_profiling import bytes_like, optimizer_cost, tensors_in
from rotor_py import Checkpointable
from rotor_py.measure.pipeline_costs import PipelineCosts, pipeline_costs
from rotor_py.plan.planned_model import plan_of
from rotor_py.report.progress import Activities, activities
from rotor_py.report.terminal import Prose, plain_table
from rotor_py.units import exact_bytes, format_bytes, format_seconds, limit_text
from rotor_py.validate.verification import default_loss
from rotor_solver import InfeasibleError, PipelinePlan, plan_pipeline, store_all, watched
from rotor_solver.pipeline import EqualCuts, equal_cuts


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    title: str
    device: str
    plan: PipelinePlan
    best_equal: EqualCuts | None  # equal cuts, and the fastest policy that fits on all ranks; None if none fits
    names: tuple[str, ...]
    stored_seconds: float  # seconds of a microbatch through all stages, each by its fastest option

    @property
    def ratio(self) -> float | None:
        seconds = self.plan.timeline.makespan
        return self.best_equal.plan.timeline.makespan / seconds if self.best_equal is not None and seconds else None


def run(request: Request) -> None:
    facts = _facts(request)
    text = json.dumps(pipeline_json(facts), indent=1)
    if request.json_file == "-":
        click.echo(text)
        return
    if request.json_file is not None:
        Path(request.json_file).write_text(text + "\n", encoding="utf-8")
    out = console()
    out.print(Prose(_verdict(facts)), "", Prose(_compared(facts)), "", _parts(facts), "", sep="\n")
    for part in facts.plan.parts:
        name = f"rank {part.rank}, from stage {part.begin}" if part.begin else f"rank {part.rank}"
        out.print(Prose(Text.assemble((f"{name}  ", "bold"), str(part.sequence))))


def _facts(request: Request) -> PipelineFacts:
    ranks = request.pipeline
    assert ranks is not None
    with activities(quiet=request.quiet) as shown:
        device = device_of(request.device)
        texts = [None] if request.mem_limit is None else request.mem_limit.split(",")
        if len(texts) not in (1, ranks):
            message = f"--mem-limit has {len(texts)} limits for {ranks} ranks; give one for each, or one for all"
            raise usage("wrong_length", "--mem-limit", message, got=len(texts), needs=ranks)
        limits = tuple(limit_on(device, each) for each in texts) * (ranks // len(texts))
        shown.doing("loading")(0, 0, request.model)
        found = load(request, Target(device))
        network, costs = _measure(found, request, shown)
        with watched(shown.doing("solving")):
            plan = _plan(costs, ranks, limits, request)
    equal = equal_cuts(costs.chain, plan, fixed=costs.fixed, boundaries=costs.boundaries, buffers=True)
    best, stored = next((each for each in equal if each.plan.fits), None), store_all(costs.chain).lower_bound or 0.0
    return PipelineFacts(found.name, str(network.device), plan, best, tuple(network.names), stored)


def _measure(found: ModelFile, request: Request, shown: Activities) -> tuple[Checkpointable, PipelineCosts]:
    with user_code(found.file):
        network = Checkpointable(
            found.model,
            mem_slots=request.slots,
            loss=found.loss or default_loss,
            optimizer=found.optimizer,
            progress=shown.doing("measuring"),
            cache=not request.no_cache,
        )
        network.measure(found.sample)
        measurement = plan_of(network).measurement
        costs = pipeline_costs(
            network.model,
            network.functions,
            measurement,
            network.device,
            microbatches=request.microbatches_or_default,
            batch_bytes=bytes_like(tensors_in(found.sample)) if measurement.prefix else 0,
            optimizer=optimizer_cost(found.optimizer) if found.optimizer else None,
        )
    return network, costs


def _plan(costs: PipelineCosts, ranks: int, limits: tuple[int, ...], request: Request) -> PipelinePlan:
    try:
        plan = plan_pipeline(
            costs.chain,
            ranks,
            limits,
            request.microbatches_or_default,
            request.schedule,
            fixed=costs.fixed,
            boundaries=costs.boundaries,
            virtual_stages=request.virtual_stages,
            buffers=True,
        )
    except InfeasibleError as error:
        raise failed(error, INFEASIBLE) from error
    except ValueError as error:
        raise usage(kind_of(error), "--pipeline", f"--pipeline: {error}") from error
    for rank, limit in enumerate(limits):
        stages = [stage for part in plan.parts_of(rank) for stage in range(part.begin, part.end)]
        stepping = sum(costs.fixed[stage] + costs.stepping[stage] for stage in stages)
        if stepping > limit:
            message = (
                f"try a limit of {limit_text(stepping)}, or more ranks: the optimizer's step on rank {rank} needs "
                f"{exact_bytes(stepping)}; the limit is {exact_bytes(limit)}"
            )
            raise Failure(message, INFEASIBLE, kind="optimizer_too_large", min_bytes=stepping, mem_limit=limit)
    return plan


def _verdict(facts: PipelineFacts) -> Text:
    plan = facts.plan
    schedule, line = plan.schedule, plan.timeline
    share = plan.slowest_seconds * schedule.ranks / facts.stored_seconds - 1 if facts.stored_seconds else 0.0
    limits = sorted({*plan.limits})
    within = " or ".join(format_bytes(limit) for limit in limits) if len(limits) < 3 else "their limits"
    return Text.assemble(
        (f"{facts.title} fits on {schedule.ranks} ranks", "bold"),
        f" in {within} each on {facts.device}, with {schedule.microbatches} microbatches as large as the sample, in "
        f"schedule {schedule.name}: the slowest rank takes {format_seconds(plan.slowest_seconds)} for a microbatch, "
        f"{share:+.1%} compared with its equal share of the time of storing everything. "
        f"A step takes {format_seconds(line.makespan)}; ranks are idle for {line.bubble:.1%} of it.",
    )


def _compared(facts: PipelineFacts) -> Text:
    said = "no policy that is the same for all ranks fits"
    if (best := facts.best_equal) is not None:
        said = f"the fastest policy that fits on all ranks ({best.policy}) takes "
        said += f"{format_seconds(best.plan.timeline.makespan)} for a step, {facts.ratio or 1.0:.2f} times as long"
    return Text.assemble(("equal cuts  ", "bold"), said)


def _parts(facts: PipelineFacts) -> Table:
    headings = ("rank", "stages", "in flight", "peak", "fixed", "kept", "time", "recomputed")
    table = plain_table(*headings, folded=("stages",))
    for part in facts.plan.parts:
        one, first, last = part.microbatch, facts.names[part.begin], facts.names[part.end - 1]
        stored = store_all(part.chain).lower_bound
        several = part.end - part.begin > 1
        table.add_row(
            str(part.rank),
            f"{part.begin}–{part.end - 1}: {first} … {last}" if several else f"{part.begin}: {first}",
            str(part.flying.forwards + part.flying.weights),
            format_bytes(part.peak_bytes),
            format_bytes(part.fixed_bytes),
            format_bytes(one.kept_bytes),
            format_seconds(one.seconds),
            f"{one.seconds / stored - 1 if stored else 0.0:+.1%}",
        )
    return table


def pipeline_json(facts: PipelineFacts) -> dict[str, Any]:
    """Return the data of `--json`. The sequence of each part numbers its stages from 0."""
    plan, best = facts.plan, facts.best_equal
    return {
        "schema": SCHEMA,
        "device": facts.device,
        "pipeline": {
            "schedule": plan.schedule.name,
            **picked(plan.schedule, "ranks microbatches virtual_stages"),
            "cuts": list(plan.cuts),
            "microbatch_seconds": plan.slowest_seconds,
            "lower_bound_seconds": plan.lower_bound,
            "step_seconds": plan.timeline.makespan,
            "bubble": plan.timeline.bubble,
            "by_rank": [
                {"rank": rank, "mem_limit": limit, "peak_bytes": peak}
                for rank, (limit, peak) in enumerate(zip(plan.limits, plan.timeline.peaks, strict=True))
            ],
            "parts": [
                {
                    "rank": part.rank,
                    "first_stage": part.begin,
                    "last_stage": part.end - 1,
                    "names": list(facts.names[part.begin : part.end]),
                    "microbatches_in_flight": part.flying.forwards,
                    "microbatches_waiting_for_weights": part.flying.weights,
                    **picked(part, "peak_bytes fixed_bytes"),
                    **picked(part.microbatch, "kept_bytes forward_seconds backward_seconds"),
                    "sequence": str(part.sequence),
                }
                for part in plan.parts
            ],
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
