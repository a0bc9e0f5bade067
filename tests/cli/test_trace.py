"""The trace, event by event against the simulator, and against the Trace Event Format."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from rotor_cli.facts import Facts
from rotor_cli.write_outputs import AFTER, AGAIN, BACKWARD, FORWARD, LIMIT, MEASURED, PREDICTED, WHILE, trace
from rotor_py import Checkpointable, Verification, simulate
from tests.checkpointable.steps import between, square

ALWAYS = {"ph", "name", "pid", "tid", "args"}
KEYS = {"X": ALWAYS | {"ts", "dur"}, "C": ALWAYS | {"ts"}, "M": ALWAYS}


@pytest.fixture(scope="module")
def facts() -> Facts:
    """A frozen layer before the chain, and a chain that has to recompute."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)]
    frozen = nn.Embedding(10, 64).requires_grad_(False)
    model = Checkpointable(nn.Sequential(frozen, *layers), torch.randint(10, (256,)), loss=square)
    limit = between(model, 0.4)
    sequence = model.compute_sequence(limit)
    return Facts("net", "cpu", limit, model.budget, model.inspection_values, sequence)


def events(facts: Facts, phase: str, pid: int = PREDICTED) -> list[dict[str, Any]]:
    return [event for event in trace(facts)["traceEvents"] if (event["ph"], event["pid"]) == (phase, pid)]


VERIFIED = Verification(1000, 0.5, 0.0, 2000, 0.25)


def test_every_event_has_the_fields_of_its_phase_and_a_named_track(facts: Facts) -> None:
    found = json.loads(json.dumps(trace(replace(facts, verified=VERIFIED))))
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    each = found["traceEvents"]
    for event in each:
        assert set(event) == KEYS[event["ph"]]
        assert isinstance(event["name"], str)
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "M":
            expected = ("sort_index", int) if event["name"].endswith("sort_index") else ("name", str)
            assert [(key, type(value)) for key, value in event["args"].items()] == [expected]
    named = {(e["pid"], e["tid"]) for e in each if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in each if e["ph"] == "X"} <= named
    processes = {e["pid"] for e in each if e["name"] == "process_name"}
    assert processes == {e["pid"] for e in each} == {PREDICTED, MEASURED}
    kinds = [e["ph"] != "M" for e in each]
    assert kinds == sorted(kinds), "names come first"
    times = [e["ts"] for e in each if e["ph"] != "M"]
    assert times == sorted(times)
    assert times[0] == 0


@pytest.mark.parametrize("seconds", [1e-7, 3.3e-5, 0.7])
def test_slices_of_a_track_do_not_overlap_where_time_is_counted_in_nanoseconds(facts: Facts, seconds: float) -> None:
    times, chain = {"forward_time": seconds / 3, "backward_time": seconds * 0.7}, facts.budget.chain
    stages = tuple(
        replace(each, options=tuple(replace(one, **times) for one in each.options), skipped_output_time=0.0)
        for each in chain.stages
    )
    timed = replace(chain, stages=stages, loss_time=seconds / 7)  # which have no end in binary
    scaled = replace(facts, budget=replace(facts.budget, chain=timed), verified=VERIFIED)
    tracks = defaultdict(list)
    for event in json.loads(json.dumps(trace(scaled)))["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"] * 1000, event["dur"] * 1000))
    assert len(tracks) == 5
    for slices in tracks.values():
        for (begin, length), (after, _) in pairwise(slices):
            for whole in (int, round):
                assert whole(begin) + whole(length) <= whole(after)


def test_operations_follow_each_other_with_simulated_memory_and_recomputations_apart(facts: Facts) -> None:
    simulated, beside = simulate(facts.chain, facts.sequence), facts.budget.beside_chain(facts.sequence)
    first, *found = events(facts, "X")
    assert first["name"] == "before the chain"
    assert [event["name"].split()[0] for event in found] == list(map(str, facts.sequence))
    assert [event["args"]["bytes_while_it_runs"] - beside for event in found] == list(simulated.during)
    assert [event["args"]["bytes_after"] - beside for event in found] == list(simulated.after)
    assert max(event["args"]["bytes_while_it_runs"] for event in found) == facts.peak_bytes
    end = 0.0
    for event in (first, *found):
        assert event["ts"] == end
        end = event["ts"] + event["dur"]
    assert end == pytest.approx(facts.step_seconds * 1e6, abs=1 / 16)
    ran: set[str] = set()
    for event in found:
        operation, _, rest = event["name"].partition(" ")
        kind, _, stage = operation.partition("_")
        if kind in ("B", "L"):
            assert event["tid"] == BACKWARD
        else:
            again = stage in ran
            assert event["tid"] == (AGAIN if again else FORWARD)
            assert rest == facts.measurement.names[int(stage)] + (" (recompute)" if again else "")
            ran.add(stage)
    assert any(event["tid"] == AGAIN for event in found)
    counters = defaultdict(list)
    for event in events(facts, "C"):
        counters[event["name"]].append((event["ts"], event["args"]["bytes"]))
    assert set(counters) == {WHILE, AFTER, LIMIT}
    assert counters[WHILE][:-1] == [(event["ts"], event["args"]["bytes_while_it_runs"]) for event in found]
    assert [size for _, size in counters[AFTER]] == [event["args"]["bytes_after"] for event in found]
    assert {size for _, size in counters[LIMIT]} == {facts.mem_limit}
    for points in counters.values():
        assert points == sorted(points, key=lambda point: point[0])


@pytest.mark.parametrize("plain", [(2000, 0.25), (None, None)])
def test_a_verified_step_stands_beside_the_predicted_one(facts: Facts, plain: tuple[Any, Any]) -> None:
    assert not events(facts, "X", MEASURED)
    verified = replace(facts, verified=Verification(1000, 0.5, 0.0, *plain))
    found = {event["name"]: (event["dur"], event["args"]["peak_bytes"]) for event in events(verified, "X", MEASURED)}
    assert found == {"planned step": (0.5e6, 1000)} | ({"plain step": (0.25e6, 2000)} if plain[0] else {})


def test_the_command_writes_trace_and_page(plan, model_file, tmp_path) -> None:
    trace_file, page = tmp_path / "trace.json", tmp_path / "plan.html"
    result = plan(model_file(), "--mem-limit", "1GB", "--verify", "--json", "-", "--trace", trace_file, "--html", page)
    assert result.exit_code == 0, result.output
    report, found = json.loads(result.stdout), json.loads(trace_file.read_text())
    assert found["otherData"]["sequence"] == report["plan"]["sequence"]
    (measured,) = (event for event in found["traceEvents"] if event["name"] == "planned step")
    counted = [e["args"]["bytes"] for e in found["traceEvents"] if (e["name"], e["pid"]) == (WHILE, MEASURED)]
    assert max(counted) == measured["args"]["peak_bytes"]
    operations = [e["name"].split()[0] for e in found["traceEvents"] if e["ph"] == "X" and e["pid"] == MEASURED]
    followed = [name for name in operations if name not in ("before", "planned", "plain")]
    assert followed == report["plan"]["sequence"].split(", ")
    assert measured["args"]["peak_bytes"] == report["verify"]["measured_peak_bytes"]
    assert "<b>net.py fits</b>" in page.read_text()
    assert "measured peak" in page.read_text()
    lines = "from rotor_py import Checkpointable\nmodel = Checkpointable(model, mem_limit=&#34;1GB&#34;, loss=loss"
    assert lines in page.read_text(), "the page says how to use the plan"
