"""Different sequences for forwards in flight, and the order of their backwards: told, noticed, and deviated from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_solver import InfeasibleError, simulate_forwards, solve_in_flight
from tests.checkpointable.steps import CPU
from tests.fields import logged, raises

LIMIT = 22_300_000
ROWS = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))


def chain() -> nn.Sequential:
    """Two forwards need 14 MB at least, and store everything in 45 MB."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)])


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def planned_with(order: str | None, **options: Any) -> Checkpointable:
    given: dict[str, Any] = {"loss": mean, "fresh_grads": True, "forwards_in_flight": 2, **options}
    return Checkpointable(chain(), ROWS, LIMIT, backward_order=order, **given)  # type: ignore[arg-type] # on purpose


def added_up(network: nn.Module) -> None:
    """Outputs and inputs are held to the end, as the prediction has it. The backwards come in reverse."""
    given = [ROWS.clone(), 2 * ROWS]
    outputs = [network(each) for each in given]
    (outputs[0].mean() + outputs[1].mean()).backward()


def in_turn(network: nn.Module) -> None:
    """The backwards come in the order of the forwards."""
    given = [ROWS.clone(), 2 * ROWS]
    outputs = [network(each) for each in given]
    for output in outputs:
        output.mean().backward()


def peak_of(network: nn.Module, step: Callable[[nn.Module], None]) -> int:
    network.zero_grad()
    return measured_peak(lambda: step(network), network.parameters(), CPU)


def same_gradients(planned: nn.Module, step: Callable[[nn.Module], None]) -> bool:
    plain = chain()
    step(plain)
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    return all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rotor_py"]


def test_two_forwards_in_reverse_follow_two_sequences_inside_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_with("reverse")
    first, second = planned.sequence.of_forwards(2)
    assert first != second
    assert (planned.sequence, *planned.sequence.beside) == (first, second)
    predicted = planned.budget.peak_bytes(planned.sequence)
    for _ in range(3):
        assert 0.8 * predicted < peak_of(planned, added_up) <= predicted <= LIMIT
        assert same_gradients(planned, added_up)
    assert said_in(caplog) == []
    # By the simulator, which knows nothing of budgets: faster than the best sequence for both, and as close as it says.
    budget = planned.budget
    alike = solve_in_flight(budget.chain, budget.chain_limit(LIMIT), 2, alike=True).sequences
    found, equal = (simulate_forwards(budget.chain, each) for each in ((first, second), alike))
    assert found.makespan < 0.995 * equal.makespan
    assert planned.report().gap < 0.01
    assert found.makespan == pytest.approx(planned.report().step_seconds)


def test_without_being_told_the_order_is_noticed_and_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_with(None)
    before = planned.report().step_seconds
    for _ in range(3):
        peak_of(planned, added_up)
    assert planned.budget.backward_order == "any"
    assert peak_of(planned, added_up) <= LIMIT
    assert same_gradients(planned, added_up)
    assert planned.budget.backward_order == "reverse"
    assert len(planned.sequence.beside) == 1
    assert planned.report().step_seconds < before
    (said,) = said_in(caplog)
    assert said.startswith("planned again: the backwards of Sequential come in reverse of its 2 forwards in flight")
    for _ in range(2):
        planned.zero_grad()
        added_up(planned)
    assert said_in(caplog) == [said]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["any", "reverse"])
def test_gradients_that_are_kept_wait_beside_those_of_the_step(order: str, caplog: pytest.LogCaptureFixture) -> None:
    """One pass adds up the gradients of both forwards before it adds them to those that are there."""
    planned = planned_with(order, fresh_grads=False)
    for _ in range(3):
        added_up(planned)
        there = [*planned.parameters(), *(parameter.grad for parameter in planned.parameters())]
        peak = measured_peak(lambda: added_up(planned), there, CPU)
        assert 0.9 * LIMIT < peak <= planned.budget.peak_bytes(planned.sequence) <= LIMIT
    assert said_in(caplog) == []
    planned = planned_with(order)  # it was told that they are freed
    added_up(planned)
    there = [*planned.parameters(), *(parameter.grad for parameter in planned.parameters())]
    assert measured_peak(lambda: added_up(planned), there, CPU) <= LIMIT
    # The meter that was on is told of as well: the model was measured beside it.
    assert ["It was planned again with gradients that are kept." in each for each in said_in(caplog)].count(True) == 1


@pytest.mark.parametrize("given", [{"backward_order": "any"}, {"watch": False}, {"by_turns": True}])
def test_it_is_not_noticed_where_it_is_no_rule(given: dict[str, Any]) -> None:
    by_turns = given.pop("by_turns", False)
    planned = planned_with(given.pop("backward_order", None), **given)
    sequence = planned.sequence
    for number in range(5):
        planned.zero_grad()
        (in_turn if by_turns and number == 1 else added_up)(planned)
    assert planned.budget.backward_order == "any"
    assert planned.sequence is sequence


def test_a_backward_in_another_order_is_warned_of_with_bytes_and_then_any_order_is_planned_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned = planned_with("reverse")
    over = peak_of(planned, in_turn)
    assert over > LIMIT  # else there is nothing to warn of
    (record,) = logged(caplog, "other_backward_order", forwards=2, mem_limit=LIMIT)
    assert said_in(caplog) == [record.getMessage()]
    told = record.__dict__["numbers"]["peak_bytes"]
    assert LIMIT < over <= told
    for step in (in_turn, added_up, in_turn):
        assert peak_of(planned, step) <= LIMIT
        assert same_gradients(planned, step)
    assert planned.budget.backward_order == "any"
    assert said_in(caplog) == [record.getMessage()]


def test_what_fits_in_any_order_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_with("reverse")
    planned.compute_sequence("1GB")
    for step in (in_turn, added_up, in_turn):
        assert peak_of(planned, step) <= planned.budget.peak_bytes(planned.sequence)
    assert said_in(caplog) == []


@pytest.mark.slow
def test_the_order_may_be_set_later_and_a_limit_as_well() -> None:
    planned = planned_with("any", watch=False)
    slower = planned.report().step_seconds
    planned.backward_order = "reverse"
    assert peak_of(planned, added_up) <= LIMIT
    assert planned.report().step_seconds < slower
    planned.compute_sequence(LIMIT - 2_000_000)
    assert planned.sequence.beside
    assert peak_of(planned, added_up) <= LIMIT - 2_000_000
    least = planned.budget.least_bytes()
    planned.compute_sequence(least)
    assert peak_of(planned, added_up) <= least
    with pytest.raises(InfeasibleError):
        planned.compute_sequence(least - 1)
    planned.backward_order = "any"
    planned.mem_limit = LIMIT
    assert peak_of(planned, in_turn) <= LIMIT
    with raises(ValueError, "unknown_value", name="backward_order"):
        planned.backward_order = "forward"


def test_a_file_has_all_sequences_and_the_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    planned, path = planned_with("reverse"), tmp_path / "plan.json"
    planned.save_plan(path)
    loaded = Checkpointable(chain(), plan=path)
    assert loaded.sequence == planned.sequence
    assert loaded.budget == planned.budget
    assert str(loaded.report()) == str(planned.report())
    assert peak_of(loaded, added_up) <= LIMIT
    assert same_gradients(loaded, added_up)
    peak_of(loaded, in_turn)
    peak_of(loaded, in_turn)
    assert len(said_in(caplog)) == len(logged(caplog, "other_backward_order")) == 1
    assert loaded.sequence == planned.sequence


def test_a_report_shows_every_sequence_and_the_forward_with_the_peak(tmp_path: Path) -> None:
    planned = planned_with("reverse")
    report = planned.report()
    text = str(report)
    assert "2 forwards are in flight at once, by 2 different sequences; their backwards come in reverse." in " ".join(
        text.split()
    )
    assert "\nforward 1  " in text
    assert "\nforward 2  " in text
    assert "whose backwards come in reverse" in planned.summary()
    assert report.peak_reason() is None  # the forward that is shown has the peak
    report.to_html(tmp_path / "plan.html")
    assert "forward 1: <code>" in (tmp_path / "plan.html").read_text()


def test_one_sequence_is_kept_where_others_gain_nothing() -> None:
    planned = planned_with("reverse")
    planned.compute_sequence(2 * planned.report().store_all_bytes)
    assert planned.sequence.beside == ()
