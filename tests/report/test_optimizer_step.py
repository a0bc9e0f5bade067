"""Where the optimizer's step is the peak, every report says so, and shows what it consists of."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_cli.facts import Facts
from rotor_cli.write_outputs import OPTIMIZER, PREDICTED, WHILE, trace
from rotor_py import Checkpointable, Report, format_bytes, simulate
from rotor_py.report.numbers import optimizer_step
from rotor_py.report.report import page, sweep_of
from rotor_py.report.step_pictures import HEIGHT, TOP, layers_of, memory_picture
from rotor_solver import moments
from tests.checkpointable.steps import square, step_peak

BATCH = torch.randn(32, 600)


def network(fresh_grads: bool = True, **changes: Any) -> tuple[Checkpointable, torch.optim.Optimizer]:
    """Two large layers, few samples, and an optimizer that makes copies of all parameters at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    given = {"loss": square, "optimizer": optimizer, "fresh_grads": fresh_grads, **changes}
    return Checkpointable(model, BATCH, "1GB", **given), optimizer


@pytest.fixture(scope="module")
def report() -> Report:
    return network()[0].report()


def running(report: Report) -> int:
    return report.budget.beside_chain(report.sequence) + simulate(report.chain, report.sequence).peak


@pytest.mark.parametrize("fresh_grads", [True, False])
def test_the_parts_of_the_step_add_up_to_the_measured_peak(fresh_grads: bool) -> None:
    planned, optimizer = network(fresh_grads)
    step_peak(planned, BATCH, optimizer)
    measured = step_peak(planned, BATCH, optimizer, fresh_grads=fresh_grads)
    step = optimizer_step(planned.report())
    trained = sum(parameter.nbytes for parameter in planned.parameters())
    assert step.total == planned.report().peak_bytes
    assert 0.98 * step.total <= measured <= step.total
    assert step.gradients == (trained if fresh_grads else 0)
    assert step.input + step.output == 2 * BATCH.nbytes
    assert step.scratch >= trained


def test_the_sentence_is_in_text_and_page_with_both_numbers(report: Report) -> None:
    reason = report.peak_reason()
    assert reason == (
        f"The peak is in the optimizer step: {format_bytes(report.peak_bytes)} there, {format_bytes(running(report))} "
        "in forward and backward. No other plan needs less there."
    )
    assert reason in " ".join(str(report).split())
    text = page(report, sweep_of(report), remarks=("measured",))
    assert text.index(f"<p>{reason}</p>") < text.index("<p>measured</p>")
    assert "optimizer step: " in text
    # Otherwise forward and backward reach the peak, or the layers before the chain.
    lean = replace(report, budget=replace(report.budget, step_bytes=64))
    assert lean.peak_bytes == running(lean)
    assert "The peak is in" not in str(lean)
    before = replace(report, budget=replace(report.budget, before_bytes=10**9))
    assert before.peak_reason().startswith("The peak is in the layers before the chain: 1.0")


def test_picture_and_trace_end_with_the_optimizer_step_which_reaches_the_peak(report: Report) -> None:
    picture, step = memory_picture(report), optimizer_step(report)
    found = moments(report.chain, report.sequence)
    layers = list(layers_of(report, found, step))
    assert sum(layer.sizes[-1] for layer in layers) == report.peak_bytes == step.total
    assert len(picture.columns) == len(found) + 1
    said = f"optimizer step: {format_bytes(report.peak_bytes)} while it runs; most"
    assert picture.columns[-1].title.startswith(said)
    assert picture.columns[-1].x + picture.columns[-1].width <= picture.width
    highest = min(float(y) for y in re.findall(r"V(-?[\d.]+)", " ".join(layer.outline for layer in picture.layers)))
    assert TOP <= highest < TOP + 0.05 * HEIGHT
    facts = Facts("net", "cpu", report.peak_bytes, report.budget, report.measurement, report.sequence)
    events = [event for event in trace(facts)["traceEvents"] if event["pid"] == PREDICTED]
    *_, before, last = (event for event in events if event["ph"] == "X")
    assert (last["name"], last["args"]["bytes_while_it_runs"]) == (OPTIMIZER, report.peak_bytes)
    assert last["ts"] == pytest.approx(before["ts"] + before["dur"])
    assert last["dur"] > 0
    counted = {event["ts"]: event["args"]["bytes"] for event in events if event["name"] == WHILE}
    assert max(counted.values()) == counted[last["ts"]] == report.peak_bytes
    assert max(counted) == pytest.approx(last["ts"] + last["dur"])


def test_an_optimizer_that_was_not_given_is_reported_from_its_first_step_on() -> None:
    planned, optimizer = network(optimizer=None)
    assert optimizer_step(planned.report()) is None
    assert len(memory_picture(planned.report()).columns) == len(planned.sequence)
    step_peak(planned, BATCH, optimizer)
    told = network()[0]
    assert planned.report().peak_reason() == told.report().peak_reason()
    assert optimizer_step(planned.report()) == optimizer_step(told.report())
