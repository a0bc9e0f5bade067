"""From a request to a plan for a pipeline: load the model, measure one microbatch, cut, compare with equal cuts."""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch

from rotor_cli.errors import INFEASIBLE, Failure, explained, usage
from rotor_cli.loading.device import device_of, limit_on
from rotor_cli.loading.model_file import ModelFile, load
from rotor_cli.loading.place import Here
from rotor_cli.pipeline_facts import PipelineFacts
from rotor_cli.reporters.pipeline import pipeline_json, render_pipeline
from rotor_cli.reporters.text import console
from rotor_cli.request import Request
from rotor_profiling import bytes_like, optimizer_cost, tensors_in
from rotor_py import Checkpointable, format_bytes
from rotor_py.measure.pipeline_costs import PipelineCosts, pipeline_costs
from rotor_py.report.progress import Activities, activities
from rotor_py.trials.default_loss import default_loss
from rotor_py.units import limit_text
from rotor_solver import InfeasibleError, PipelinePlan, plan_pipeline, watched
from rotor_solver.pipeline import equal_cuts


def run(request: Request) -> None:
    """Plan the pipeline, and write and print what was found; Failure if that cannot be done."""
    facts = _facts(request)
    text = json.dumps(pipeline_json(facts), indent=1)
    if request.json_file == "-":
        click.echo(text)
        return
    if request.json_file is not None:
        Path(request.json_file).write_text(text + "\n", encoding="utf-8")
    console().print(render_pipeline(facts))


def _facts(request: Request) -> PipelineFacts:
    assert request.pipeline is not None
    with activities(quiet=request.quiet) as shown:
        device = device_of(request.device)
        limits = _limits(request.mem_limit, request.pipeline, device)
        shown.doing("loading")(0, 0, request.model)
        found = load(
            request.model,
            Here(device),
            request.batch_size,
            request.shape,
            request.config,
            dtype=request.dtype,
            optimizer=request.optimizer,
        )
        network, costs = _measure(found, request, shown)
        with watched(shown.doing("solving")):
            plan = _plan(costs, limits, request)
    equal = equal_cuts(costs.chain, plan, fixed=costs.fixed, boundaries=costs.boundaries, buffers=True)
    stored = sum(min(way.forward_time + way.backward_time for way in stage.options) for stage in costs.chain)
    return PipelineFacts(
        found.name, str(network.device), plan, equal, tuple(network.names), stored + costs.chain.loss_time
    )


def _limits(text: str | None, ranks: int, device: torch.device) -> tuple[int, ...]:
    """The limit of every rank: one for all, or several with commas between them."""
    texts = [None] if text is None else text.split(",")
    if len(texts) not in (1, ranks):
        raise usage(f"--mem-limit has {len(texts)} limits for {ranks} ranks; give one for each, or one for all")
    limits = tuple(limit_on(device, each) for each in texts)
    return limits if len(limits) == ranks else limits * ranks


def _measure(found: ModelFile, request: Request, shown: Activities) -> tuple[Checkpointable, PipelineCosts]:
    with explained(found.file):
        network = Checkpointable(
            found.model,
            mem_slots=request.slots,
            loss=found.loss or default_loss,
            optimizer=found.optimizer,
            progress=shown.doing("measuring"),
            cache=not request.no_cache,
        )
        network.measure(found.sample)
        assert network.inspection_values is not None
        prefix = network.inspection_values.prefix
        costs = pipeline_costs(
            network.model,
            network.functions,
            network.inspection_values,
            network.device,
            microbatches=request.microbatches_or_default,
            batch_bytes=bytes_like(tensors_in(found.sample)) if prefix else 0,
            optimizer=optimizer_cost(found.optimizer) if found.optimizer else None,
        )
    return network, costs


def _plan(costs: PipelineCosts, limits: tuple[int, ...], request: Request) -> PipelinePlan:
    assert request.pipeline is not None
    try:
        plan = plan_pipeline(
            costs.chain,
            request.pipeline,
            limits,
            request.microbatches_or_default,
            request.schedule,
            fixed=costs.fixed,
            boundaries=costs.boundaries,
            virtual_stages=request.virtual_stages_or_default,
            buffers=True,
        )
    except InfeasibleError as error:
        # With several parts on a rank, its limit is divided among them in a few ways; another way might do with less.
        several = request.schedule == "interleaved"
        needs = (
            "the way in which the limits are divided among the parts of a rank needs"
            if several
            else "it needs at least"
        )
        raise Failure(
            f"the model does not fit on {request.pipeline} ranks, wherever it is cut: {needs} "
            f"{format_bytes(error.min_bytes)} ({error.min_bytes} bytes) on a rank whose limit is "
            f"{format_bytes(error.mem_limit)} ({error.mem_limit} bytes). Try smaller microbatches, more ranks, or a "
            f"limit of {limit_text(error.min_bytes)}.",
            INFEASIBLE,
        ) from error
    except ValueError as error:
        raise usage(f"--pipeline: {error}") from error
    for rank, limit in enumerate(limits):
        stages = [stage for part in plan.parts_of(rank) for stage in range(part.begin, part.end)]
        stepping = sum(costs.fixed[stage] + costs.stepping[stage] for stage in stages)
        if stepping > limit:
            raise Failure(
                f"the optimizer's step on rank {rank} needs {format_bytes(stepping)} ({stepping} bytes); the limit is "
                f"{format_bytes(limit)} ({limit} bytes). Try more ranks, or a limit of {limit_text(stepping)}.",
                INFEASIBLE,
            )
    return plan
