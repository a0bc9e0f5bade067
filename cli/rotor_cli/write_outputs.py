"""Write the files that options ask for, and print the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rotor_cli.facts import Facts
from rotor_cli.request import Request
from rotor_cli.text_report import batches, comparison, console, curve, render, usage_lines, verified
from rotor_py.report.numbers import NAME, optimizer_step
from rotor_py.report.sweep import BatchChoice, label
from rotor_py.stage.compression import rounded_stages
from rotor_py.validate.steps import TimedOperation
from rotor_py.validate.verification import Verification
from rotor_solver import Backward, Loss
from rotor_solver.frontier import draw
from rotor_solver.offload import timed_moments, transfers

SCHEMA = 1  # version of the JSON data: raise it when a key is dropped or changes its meaning, not for a new key


def write_outputs(facts: Facts, request: Request) -> None:
    """Write trace, HTML page, plot and JSON to their files, and print the report; with `--json -`, only the JSON."""
    if request.trace_file is not None:
        Path(request.trace_file).write_text(json.dumps(trace(facts)) + "\n", encoding="utf-8")
    if request.html_file is not None:
        remarks = () if facts.verified is None else (verified(facts, facts.verified).plain,)
        usage = usage_lines(facts, request.plan_file) if facts.limited else ""  # for --sweep alone, there is no plan
        facts.to_html(request.html_file, remarks, usage=usage)
    if request.plot_file is not None and facts.sweep is not None:
        strategies = [(point.name, point.mem_limit, point.overhead - 1) for point in facts.sweep.strategies]
        limits, overheads = zip(*((point.mem_limit, point.overhead - 1) for point in facts.sweep.points), strict=True)
        draw(request.plot_file, limits, overheads, points=strategies, title=facts.title)
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
        out.print("", batches(facts.batches, out.width), sep="\n")
    if facts.compared:
        out.print("", comparison(facts.compared), sep="\n")
    if request.sweep and facts.sweep is not None:
        drawn = curve(facts.sweep, facts.title, out.width, request.overhead)
        out.print(*([""] if facts.limited else []), drawn, sep="\n")


def json_report(facts: Facts) -> dict[str, Any]:
    """Return the data of `--json`. For --sweep alone, which makes no plan, "mem_limit" and "plan" are missing."""
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
        found = facts.verified
        data["verify"] = {
            **picked(found, _VERIFIED),
            **({} if found.rounded is None else {"gradient_error": found.rounded.gradient_error}),
            **({} if found.eager_difference is None else {"eager_difference": found.eager_difference}),
            **picked(found, "plain_peak_bytes plain_step_seconds"),
        }
    if facts.compared:
        data["compare"] = [
            picked(each, "strategy fits peak_bytes step_seconds overhead")
            | ({} if each.verified is None else picked(each.verified, _VERIFIED))
            for each in facts.compared
        ]
    if facts.batches is not None:
        data["batch"] = _batch(facts.batches)
    if (sweep := facts.sweep) is not None:
        keys = "mem_limit step_seconds overhead"
        data["sweep"] = {
            "points": [{**picked(point, keys), "activations_saved": sweep.saved(point)} for point in sweep.points],
            "strategies": [{"strategy": point.name, **picked(point, keys)} for point in sweep.strategies],
        }
    if facts.basis is not None:
        data["prediction"] = facts.basis.as_data()
        # Ranges get a key of their own: "step_seconds" stays one number, the time by which plans were compared.
        for key, value in (("plan", facts.step_seconds), ("store_all", facts.store_all_seconds)):
            data[key]["step_seconds_range"] = list(facts.basis.seconds(value))
    if not facts.limited:
        del data["mem_limit"], data["plan"]
    return data


def picked(found: object, names: str) -> dict[str, Any]:
    """Return a dict of the fields of `found` whose names `names` lists, separated by spaces."""
    return {name: getattr(found, name) for name in names.split()}


_VERIFIED = "measured_peak_bytes measured_step_seconds max_grad_difference"
_STAGE_NUMBERS = (
    "forward_seconds nograd_seconds backward_seconds activation_bytes saved_bytes forward_temp_bytes "
    "nograd_temp_bytes backward_temp_bytes replay_temp_bytes"
)


def _stages(facts: Facts) -> list[dict[str, Any]]:
    measured, found = facts.measurement, []
    rows = zip(measured.names, measured.stages, measured.ways_by_stage, facts.actions(), strict=True)
    for name, cost, ways, action in rows:
        costs = {way.name: picked(way.cost, "forward_seconds backward_seconds saved_bytes") for way in ways}
        # Costs of the option "in part" or, if the stage lacks it, of another of that family: "in part, packed".
        in_part = [costs[key] for key in sorted(costs, key=lambda key: key != "in part") if key.startswith("in part")]
        numbers = picked(cost, _STAGE_NUMBERS)
        found.append({"name": name, **numbers, "in_part": next(iter(in_part), None), "ways": costs, "action": action})
    return found


def _batch(choice: BatchChoice) -> dict[str, Any]:
    keys = "aim batch samples_per_second gap optimizer_seconds accumulation_steps effective_batch measured_peak_bytes"
    beyond = {"batch": choice.beyond, "needed_bytes": choice.beyond_bytes, "measured": choice.beyond_measured}
    return {
        **picked(choice, f"{keys} largest largest_stored"),
        "measured_samples_per_second": {str(batch): rate for batch, rate in choice.measured_per_second},
        "beyond": None if choice.beyond is None else beyond,
        "points": [
            {
                **picked(point, "batch samples_per_second"),
                "store_all_samples_per_second": point.stored_per_second,
                "measured": point.measured,
            }
            for point in choice.points
        ],
    }


# The predicted and measured step as trace events for Perfetto and chrome://tracing.


Event = dict[str, Any]
PREDICTED, MEASURED = 1, 2
# Thread ids of the tracks. None is a process id: viewers call a thread with the id of its process the main thread.
FORWARD, AGAIN, BACKWARD = 11, 12, 13
PLANNED, PLAIN = 14, 15
OUT, BACK = 16, 17
_TRACKS = {FORWARD: "forward", AGAIN: "recomputation", BACKWARD: "backward"}
_COPIES = {OUT: "copies out", BACK: "copies back"}
OPTIMIZER = f"{NAME} (its time is not measured)"
_SHARE = 0.03  # drawn length of the optimizer step, whose time is unknown, as a share of the whole step; a guess
WHILE, AFTER, LIMIT = "memory while it runs", "memory kept after it", "limit"


def trace(facts: Facts) -> dict[str, Any]:
    """Return the predicted step, with --verify also a measured one, in the Trace Event Format (microseconds, bytes)."""
    copies = list(_copies(facts))
    tracks = {**_TRACKS, **_COPIES} if copies else _TRACKS
    events = [*_heads("predicted step", PREDICTED, tracks), *_predicted(facts), *copies]
    if facts.verified is not None:
        whole = {PLANNED: "planned", PLAIN: "plain"} if facts.verified.plain_step_seconds else {PLANNED: "planned"}
        tracks = {**_TRACKS, **whole} if facts.verified.operations else whole
        events += [*_heads("measured step", MEASURED, tracks), *_measured(facts, facts.verified)]
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": facts.title, "device": facts.device, "sequence": str(facts.shown)},
    }


def _heads(process: str, pid: int, tracks: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, name in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _predicted(facts: Facts) -> Iterator[Event]:
    beside, start = facts.budget.beside_chain(facts.sequence), facts.before_chain_seconds
    if start:
        yield _complete("before the chain", PREDICTED, FORWARD, 0.0, start, {})
    found = timed_moments(facts.chain, facts.shown, facts.budget.link)
    for moment in found:
        during, after = beside + moment.during, beside + moment.after
        ran = TimedOperation(moment.operation, moment.again, start + moment.begin, moment.seconds, during, after)
        yield from _operation(PREDICTED, facts, ran, {"fixed_bytes": beside})
    end = start + found[-1].begin + found[-1].seconds
    if (step := optimizer_step(facts)) is not None:
        sizes = {"bytes_while_it_runs": step.total, "bytes_after": step.total - step.scratch, "fixed_bytes": step.fixed}
        yield _counter(WHILE, PREDICTED, end, step.total)
        yield _complete(OPTIMIZER, PREDICTED, BACKWARD, end, _SHARE * (end - start), sizes)
        end += _SHARE * (end - start)
        yield _counter(AFTER, PREDICTED, end, step.total - step.scratch)
    yield _counter(WHILE, PREDICTED, end, found[-1].after + beside if step is None else step.total - step.scratch)
    yield from (_counter(LIMIT, PREDICTED, seconds, facts.mem_limit) for seconds in (0.0, end))


def _copies(facts: Facts) -> Iterator[Event]:
    for each in transfers(facts.chain, facts.shown, facts.budget.link):
        name, begin = facts.measurement.names[each.stage], facts.before_chain_seconds + each.begin
        track, sizes = OUT if each.out else BACK, {"moved_bytes": each.moved}
        yield _complete(f"{_COPIES[track]}: {name}", PREDICTED, track, begin, each.end - each.begin, sizes)


def _operation(pid: int, facts: Facts, ran: TimedOperation, more: dict[str, int]) -> Iterator[Event]:
    name = label(ran.operation, facts.measurement.names) + (" (recompute)" if ran.again else "")
    track = BACKWARD if isinstance(ran.operation, Backward | Loss) else AGAIN if ran.again else FORWARD
    sizes = {"bytes_while_it_runs": ran.during, "bytes_after": ran.after, **more}
    yield _complete(name, pid, track, ran.begin, ran.seconds, sizes)
    yield _counter(WHILE, pid, ran.begin, ran.during)
    yield _counter(AFTER, pid, ran.begin + ran.seconds, ran.after)


def _measured(facts: Facts, found: Verification) -> Iterator[Event]:
    if found.operations:
        yield _complete("before the stages", MEASURED, FORWARD, 0.0, found.operations[0].begin, {})
        for ran in found.operations:
            yield from _operation(MEASURED, facts, ran, {})
        end = found.operations[-1].begin + found.operations[-1].seconds
        yield from (_counter(LIMIT, MEASURED, seconds, facts.mem_limit) for seconds in (0.0, end))
    steps = (
        ("planned", PLANNED, found.measured_step_seconds, found.measured_peak_bytes),
        ("plain", PLAIN, found.plain_step_seconds, found.plain_peak_bytes),
    )
    for name, track, seconds, peak in steps:
        if seconds is not None and peak is not None:
            yield _complete(f"{name} step", MEASURED, track, 0.0, seconds, {"peak_bytes": peak})
            for at in (0.0, seconds):
                yield _counter(f"measured peak, {name}", MEASURED, at, peak)


def _complete(name: str, pid: int, tid: int, begin: float, seconds: float, sizes: dict[str, int]) -> Event:
    start = _microseconds(begin)
    length = _microseconds(begin + seconds) - start
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length, "args": sizes}


def _counter(name: str, pid: int, seconds: float, size: int) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _microseconds(seconds), "args": {"bytes": size}}


def _microseconds(seconds: float) -> float:
    """Convert to microseconds, in eighths, whose float sums are exact: Perfetto drops slices that overlap."""
    return round(seconds * 8e6) / 8
