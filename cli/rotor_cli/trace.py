"""The predicted and measured step as trace events for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rotor_cli.facts import Facts
from rotor_py.report.numbers import NAME, optimizer_step
from rotor_py.report.sweep import label
from rotor_py.validate.steps import TimedOperation
from rotor_py.validate.verification import Verification
from rotor_solver import Backward, Loss
from rotor_solver.moving import timed_moments, transfers

Event = dict[str, Any]
PREDICTED, MEASURED = 1, 2
FORWARD, AGAIN, BACKWARD = 11, 12, 13
"""Thread ids other than process ids: a thread with its process's id would be called the main thread."""
PLANNED, PLAIN = 14, 15
OUT, BACK = 16, 17
_TRACKS = {FORWARD: "forward", AGAIN: "recomputation", BACKWARD: "backward"}
_COPIES = {OUT: "copies out", BACK: "copies back"}
OPTIMIZER = f"{NAME} (its time is not measured)"
_SHARE = 0.03
"""Drawn share of the optimizer step: just wide enough to be seen."""
WHILE, AFTER, LIMIT = "memory while it runs", "memory kept after it", "limit"


def trace(facts: Facts) -> dict[str, Any]:
    """The step as JSON of the Trace Event Format: `ts` and `dur` in microseconds, memory in bytes.

    Process 1 is the predicted step. Process 2, if a step was verified, is the measured one: its operations, and the
    duration of whole steps without listeners.
    """
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
    step = optimizer_step(facts)
    if step is not None:
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
        first = found.operations[0].begin
        yield _complete("before the stages", MEASURED, FORWARD, 0.0, first, {})
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
    """Round to eighths, exact as binary fractions: Perfetto drops a slice that ends after the next one begins."""
    return round(seconds * 8e6) / 8
