"""Write the requested files and JSON, and print the report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rotor_cli.charts import batches, curve, plot
from rotor_cli.facts import Facts
from rotor_cli.request import Request
from rotor_cli.text_report import Comparison, console, render, usage_lines, verified
from rotor_cli.trace import trace
from rotor_py.report.batch_choice import BatchChoice
from rotor_py.report.sweep import Point, Sweep
from rotor_py.stage.compression import rounded_stages
from rotor_py.validate.comparison import ComparedStrategy
from rotor_py.validate.verification import Verification

SCHEMA = 1
"""Raised when a key is dropped or changes its meaning; new keys do not raise it."""


def write_outputs(facts: Facts, request: Request) -> None:
    """Write trace, page, plot and JSON to their files, and print the report, or only JSON with `--json -`.

    Raises OSError if a file cannot be written.
    """
    if request.trace_file is not None:
        Path(request.trace_file).write_text(json.dumps(trace(facts)) + "\n", encoding="utf-8")
    if request.html_file is not None:
        remarks = (verified(facts).plain,) if facts.verified is not None else ()
        usage = usage_lines(facts, request.plan_file) if facts.limited else ""  # without a limit, nothing is planned
        facts.to_html(request.html_file, remarks, usage=usage)
    if request.plot_file is not None and facts.sweep is not None:
        plot(facts.sweep, request.plot_file, facts.title)
    if request.json_file is not None:
        data = json.dumps(json_report(facts), indent=1)
        if request.json_file == "-":
            click.echo(data)
            return
        Path(request.json_file).write_text(data + "\n", encoding="utf-8")
    out = console()
    if facts.limited:
        out.print(render(facts, saved_plan=request.plan_file))
    if facts.batches is not None:
        out.print("", batches(facts.batches), sep="\n")
    if facts.compared:
        out.print("", Comparison(facts.compared), sep="\n")
    if request.sweep and facts.sweep is not None:
        out.print(*([""] if facts.limited else []), curve(facts.sweep, facts.title, request.overhead), sep="\n")


def json_report(facts: Facts) -> dict[str, Any]:
    """JSON of `--json`. Without a limit, it has neither "mem_limit" nor "plan"."""
    names = facts.measurement.names
    rounded = {names[stage]: word for stage, word in sorted(rounded_stages(facts.chain, facts.sequence).items())}
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "device": facts.device,
        "mem_limit": facts.mem_limit,
        "fixed_bytes": facts.budget.fixed.total,
        "min_bytes": facts.budget.least_bytes(),
        **({"freed_gradient_bytes": freed} if (freed := facts.budget.freed_gradients) else {}),
        "time_spread": facts.measurement.spread,
        "store_all": {"peak_bytes": facts.store_all_bytes, "step_seconds": facts.store_all_seconds},
        "plan": {
            "peak_bytes": facts.peak_bytes,
            "step_seconds": facts.step_seconds,
            "overhead": facts.overhead,
            "sequence": str(facts.sequence),
            "algorithm": facts.sequence.algorithm,
            "gap": facts.gap,
            "forwards_in_flight": facts.budget.forwards,
            "backward_order": facts.budget.backward_order,
            "sequences": [str(each) for each in facts.sequence.of_forwards(facts.budget.forwards)],
            **({"compiled": list(facts.compiled)} if facts.compiled else {}),
            **({"fewer_bits": rounded} if rounded else {}),
            **({} if facts.budget.link is None else {"moved_bytes": facts.budget.moved_bytes(facts.sequence)}),
        },
        "stages": _stages(facts),
    }
    if facts.taken is not None:
        data["taken"] = asdict(facts.taken)
    if facts.verified is not None:
        data["verify"] = _verify(facts.verified)
    if facts.compared:
        data["compare"] = [_strategy(compared) for compared in facts.compared]
    if facts.batches is not None:
        data["batch"] = _batch(facts.batches)
    if facts.sweep is not None:
        data["sweep"] = _sweep(facts.sweep)
    if facts.basis is not None:
        peaks = {
            "peak_bytes": facts.peak_bytes,
            "store_all_peak_bytes": facts.store_all_bytes,
            "min_bytes": facts.budget.least_bytes(),
        }
        if facts.reserved is not None:
            peaks["step_peak_bytes"] = facts.reserved.step_bytes
            peaks["reserved_bytes"] = facts.reserved.reserved_bytes
            peaks["reserved_expandable_bytes"] = facts.reserved.expandable_bytes
        seconds = {"step_seconds": facts.step_seconds, "store_all_step_seconds": facts.store_all_seconds}
        data["prediction"] = facts.basis.as_data(peaks, seconds)
        # Ranges are separate keys: the plan was solved with the plain numbers.
        for key, value in (("plan", facts.step_seconds), ("store_all", facts.store_all_seconds)):
            data[key]["step_seconds_range"] = list(facts.basis.seconds(value))
    if not facts.limited:
        del data["mem_limit"], data["plan"]
    return data


def _stages(facts: Facts) -> list[dict[str, Any]]:
    measured, found = facts.measurement, []
    for name, cost, ways, action in zip(
        measured.names, measured.stages, measured.ways_by_stage, facts.actions(), strict=True
    ):
        costs = {
            way.name: {each: getattr(way.cost, each) for each in ("forward_seconds", "backward_seconds", "saved_bytes")}
            for way in ways
        }
        # Variants of "in part" recompute less or more.
        in_part = [costs[key] for key in sorted(costs, key=lambda key: key != "in part") if key.startswith("in part")]
        numbers = (
            "forward_seconds", "nograd_seconds", "backward_seconds", "activation_bytes", "saved_bytes",
            "forward_temp_bytes", "nograd_temp_bytes", "backward_temp_bytes", "replay_temp_bytes",
        )  # fmt: skip
        found.append(
            {
                "name": name,
                **{each: getattr(cost, each) for each in numbers},
                "in_part": next(iter(in_part), None),
                "ways": costs,
                "action": action,
            }
        )
    return found


def _verify(found: Verification) -> dict[str, Any]:
    return {
        "measured_peak_bytes": found.measured_peak_bytes,
        "measured_step_seconds": found.measured_step_seconds,
        "max_grad_difference": found.max_grad_difference,
        **({} if found.rounded is None else {"gradient_error": found.rounded.gradient_error}),
        **({} if found.eager_difference is None else {"eager_difference": found.eager_difference}),
        "plain_peak_bytes": found.plain_peak_bytes,
        "plain_step_seconds": found.plain_step_seconds,
    }


def _strategy(compared: ComparedStrategy) -> dict[str, Any]:
    data: dict[str, Any] = {
        "strategy": compared.strategy,
        "fits": compared.fits,
        "peak_bytes": compared.peak_bytes,
        "step_seconds": compared.step_seconds,
        "overhead": compared.overhead,
    }
    if compared.verified is not None:
        data["measured_peak_bytes"] = compared.verified.measured_peak_bytes
        data["measured_step_seconds"] = compared.verified.measured_step_seconds
        data["max_grad_difference"] = compared.verified.max_grad_difference
    return data


def _batch(choice: BatchChoice) -> dict[str, Any]:
    beyond = {"batch": choice.beyond, "needed_bytes": choice.beyond_bytes, "measured": choice.beyond_measured}
    return {
        "aim": choice.aim,
        "batch": choice.batch,
        "samples_per_second": choice.samples_per_second,
        "gap": choice.gap,
        "optimizer_seconds": choice.optimizer_seconds,
        "accumulation_steps": choice.accumulation_steps,
        "effective_batch": choice.effective_batch,
        "measured_peak_bytes": choice.measured_peak_bytes,
        "measured_samples_per_second": {str(batch): rate for batch, rate in choice.measured_per_second},
        "largest": choice.largest,
        "largest_stored": choice.largest_stored,
        "beyond": None if choice.beyond is None else beyond,
        "points": [
            {
                "batch": point.batch,
                "samples_per_second": point.samples_per_second,
                "store_all_samples_per_second": point.stored_per_second,
                "measured": point.measured,
            }
            for point in choice.points
        ],
    }


def _sweep(sweep: Sweep) -> dict[str, Any]:
    def data(point: Point) -> dict[str, Any]:
        return {"mem_limit": point.mem_limit, "step_seconds": point.step_seconds, "overhead": point.overhead}

    return {
        "points": [{**data(point), "activations_saved": sweep.saved(point)} for point in sweep.points],
        "strategies": [{"strategy": point.name, **data(point)} for point in sweep.strategies],
    }
