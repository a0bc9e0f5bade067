"""Several forwards before a backward, and the order of their backwards: declared, detected, or warned of."""

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_solver import InfeasibleError, Sqrt, simulate_forwards, solve_in_flight, store_all
from tests.checkpointable import steps
from tests.checkpointable.steps import CPU, Tower, said_in, same_gradients
from tests.fields import kinds, logged, raises

ROWS = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


def chain() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return chain() if kind == "chain" else Tower(64, 4)


def planned_at(share: float, kind: str = "chain", forwards: int = 1, **options: Any) -> Checkpointable:
    # Not watched: two at once cannot measure memory.
    options = {"loss": None, "fresh_grads": True, "watch": False, **options}
    return steps.planned_at(share, made(kind), ROWS, forwards_in_flight=forwards, **options)


def added_up(network: nn.Module, forwards: int = 2) -> None:
    """Outputs and inputs are held to the end, as the prediction has it. The backwards come in reverse."""
    given = [(1 + number) * ROWS for number in range(forwards)]
    outputs = [network(each) for each in given]
    sum(output.mean() for output in outputs).backward()  # type: ignore[union-attr] # not an int


def in_turn(network: nn.Module, forwards: int = 2) -> None:
    """The backwards come in the order of the forwards, as in a pipeline."""
    given = [(1 + number) * ROWS for number in range(forwards)]
    outputs = [network(each) for each in given]
    for output in outputs:
        output.mean().backward()


def rolling(network: nn.Module, forwards: int = 2) -> None:
    """As soon as one is over, another begins."""
    outputs = [network((1 + number) * ROWS) for number in range(forwards)]
    for number in range(3):
        outputs.pop(0).mean().backward()
        outputs.append(network((forwards + number) * ROWS))
    for output in outputs:
        output.mean().backward()


def warnings_of(caplog) -> list[str]:
    """Those about forwards. Gradients that are kept, or a graph, are told of as well."""
    return [said for said in said_in(caplog) if "in flight" in said]


def peak_of(planned: Checkpointable, step, *given: int) -> int:
    planned.zero_grad()
    return measured_peak(lambda: step(planned, *given), planned.parameters(), CPU)  # each forward has its own input


def exact(planned: Checkpointable, step, *given: int, kind: str = "chain") -> bool:
    plain = made(kind)
    step(plain, *given)
    return same_gradients(planned, plain)


@pytest.mark.parametrize(("kind", "forwards", "share"), [("captured", 2, 0.3), ("chain", 4, 0.0)])
def test_declared_forwards_stay_inside_the_limit_in_any_order(kind: str, share: float, forwards: int, caplog) -> None:
    planned = planned_at(share, kind, forwards)
    predicted = planned.budget.peak_bytes(planned.sequence)
    assert predicted <= planned.mem_limit
    for step in (added_up, in_turn, rolling):
        measured = peak_of(planned, step, forwards)
        assert measured <= predicted
        assert measured > 0.8 * predicted or step is not added_up or share != 0.3  # the prediction is close
        assert exact(planned, step, forwards, kind=kind)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(("kind", "step"), [("chain", added_up), ("captured", in_turn), ("chain", rolling)])
def test_a_step_over_its_limit_is_warned_of_and_the_next_is_inside(kind: str, step, caplog) -> None:
    planned = planned_at(0.7, kind)
    first = peak_of(planned, step)
    over, *others = logged(caplog, "forwards_over_limit", forwards=2, mem_limit=planned.mem_limit)
    assert "Say forwards_in_flight=2 (--forwards-in-flight 2), and" in over.getMessage()
    assert planned.mem_limit < first <= over.__dict__["numbers"]["peak_bytes"]
    assert peak_of(planned, step) <= planned.mem_limit
    assert exact(planned, step, kind=kind)
    assert not others
    assert len(logged(caplog, "planning_again", cause="forwards", forwards=2)) == 1


def test_the_step_that_shows_them_is_kept_inside_where_that_is_possible_unless_the_sequence_is_the_users(caplog):
    planned = planned_at(1.0)
    planned.compute_sequence(int(1.6 * planned.mem_limit))  # all is stored, and some of the limit is left
    for _ in range(2):
        assert peak_of(planned, added_up) <= planned.mem_limit
        assert exact(planned, added_up)
    assert len(warnings_of(caplog)) == len(logged(caplog, "planning_again", forwards=2)) == 1
    # A sequence of the user is followed.
    caplog.clear()
    planned = planned_at(0.7)
    sequence = planned.sequence = store_all(planned.chain)
    for _ in range(2):
        planned.zero_grad()
        added_up(planned)
        assert planned.sequence == sequence
    assert len(warnings_of(caplog)) == len(logged(caplog, "forwards_over_limit")) == 1


def test_more_at_once_than_declared_are_planned_for(caplog) -> None:
    planned = planned_at(0.7)
    planned.forwards_in_flight = 2  # counts from the next step
    assert peak_of(planned, added_up) <= planned.mem_limit
    planned.compute_sequence(int(1.5 * planned.mem_limit))
    added_up(planned)
    assert warnings_of(caplog) == []
    added_up(planned, 3)
    assert peak_of(planned, added_up, 3) <= planned.mem_limit
    assert exact(planned, added_up, 3)
    assert logged(caplog, "planning_again", forwards=3)
    planned.compute_sequence(algo=Sqrt())  # leaves room for them too
    assert peak_of(planned, added_up, 3) <= planned.mem_limit


def test_where_no_plan_leaves_room_training_goes_on_with_a_warning(caplog) -> None:
    planned = planned_at(0.0)
    for _ in range(3):
        planned.zero_grad()
        added_up(planned)
        assert exact(planned, added_up)
    assert kinds(caplog) == ["forwards_over_limit", "planning_again", "forwards_over_limit"]
    least = int(re.findall(r"at least [^(]*\((\d+) bytes\)", warnings_of(caplog)[-1])[0])
    assert Checkpointable(chain(), ROWS, least, fresh_grads=True, forwards_in_flight=2).sequence is not None
    with pytest.raises(InfeasibleError) as refused:
        Checkpointable(chain(), ROWS, least - 1, fresh_grads=True, forwards_in_flight=2)
    assert refused.value.min_bytes == least


def test_several_kinds_of_steps_in_flight_together_stay_inside_the_limit(caplog) -> None:
    """A discriminator on real images and on made ones, which get a gradient."""
    planned = planned_at(0.8)
    limit = planned.mem_limit

    def step(network: nn.Module) -> None:
        made = (2 * ROWS).requires_grad_()
        real, fake = network(1 * ROWS), network(made)
        (real.mean() - fake.mean()).backward()

    for _ in range(2):
        planned.zero_grad()
        step(planned)
    said = len(warnings_of(caplog))
    for _ in range(2):
        assert peak_of(planned, step) <= limit
        assert exact(planned, step)
    assert len(warnings_of(caplog)) == said


@pytest.mark.parametrize("forwards", [0, 1.5, True, "2"])
def test_an_invalid_number_or_order_of_forwards_is_refused(forwards: Any) -> None:
    planned = Checkpointable(chain())
    with raises(ValueError, "not_a_count", name="forwards_in_flight"):
        Checkpointable(chain(), forwards_in_flight=forwards)
    with raises(ValueError, "not_a_count", name="forwards_in_flight"):
        planned.forwards_in_flight = forwards
    with raises(ValueError, "unknown_value", name="backward_order"):
        planned.backward_order = "forward"
    assert planned.forwards_in_flight == 1


def test_forwards_that_are_not_in_flight_do_not_count_and_one_whose_graph_is_retained_is(caplog) -> None:
    planned, outputs = planned_at(0.5), []
    for _ in range(3):  # outputs that are kept
        outputs.append(planned(ROWS))
        outputs[-1].mean().backward()
    planned(ROWS)  # dropped
    gc.collect()
    with torch.no_grad():
        outputs.append(planned(ROWS))
    output = planned(ROWS)
    for _ in range(2):
        output.mean().backward(retain_graph=True)
    del output, outputs  # and the graph with them
    torch.autograd.grad(planned(ROWS).mean(), list(planned.parameters()))
    planned(ROWS).mean().backward()
    added_up(Checkpointable(chain(), every_n_layers=2))  # by hand, without a limit
    assert warnings_of(caplog) == []
    output = planned(ROWS)
    output.mean().backward(retain_graph=True)
    measured = measured_peak(lambda: planned(ROWS).mean().backward(), [*planned.parameters(), ROWS], CPU)
    assert logged(caplog, "forwards_over_limit", forwards=2)
    assert measured + planned.memory().kept_bytes > planned.mem_limit
    output.mean().backward()


# The order of the backwards.


def planned_with(order: str | None, **options: Any) -> Checkpointable:
    return planned_at(0.25, forwards=2, backward_order=order, loss=torch.mean, **{"watch": None, **options})


def test_two_forwards_in_reverse_follow_two_sequences_inside_the_limit(caplog) -> None:
    planned = planned_with("reverse")
    first, second = planned.sequence.of_forwards(2)
    assert first != second
    assert (planned.sequence, *planned.sequence.beside) == (first, second)
    predicted = planned.budget.peak_bytes(planned.sequence)
    for _ in range(2):
        assert 0.8 * predicted < peak_of(planned, added_up) <= predicted <= planned.mem_limit
        assert exact(planned, added_up)
    assert said_in(caplog) == []
    # By the simulator, which knows nothing of budgets: faster than the best sequence for both, and as close as it says.
    budget = planned.budget
    alike = solve_in_flight(budget.chain, budget.chain_limit(planned.mem_limit), 2, alike=True).sequences
    found, equal = (simulate_forwards(budget.chain, each) for each in ((first, second), alike))
    assert found.makespan < 0.995 * equal.makespan
    report = planned.report()
    assert found.makespan == pytest.approx(report.step_seconds)
    assert report.gap < 0.01
    text = " ".join(str(report).split())
    assert "2 forwards are in flight at once, by 2 different sequences; their backwards come in reverse." in text
    assert "whose backwards come in reverse" in planned.summary()
    assert "forward 1: &lt;code&gt;" in report._repr_html_()
    assert report.peak_reason() is None  # the forward that is shown has the peak
    planned.compute_sequence(2 * report.store_all_bytes)  # where others gain nothing, there is one
    assert planned.sequence.beside == ()


def test_an_undeclared_reverse_order_is_detected_and_planned_for(caplog) -> None:
    planned = planned_with(None)
    before = planned.report().step_seconds
    for _ in range(3):
        peak_of(planned, added_up)
    assert planned.budget.backward_order == "any"
    assert peak_of(planned, added_up) <= planned.mem_limit
    assert exact(planned, added_up)
    assert planned.budget.backward_order == "reverse"
    assert len(planned.sequence.beside) == 1
    assert planned.report().step_seconds < before
    planned.zero_grad()
    added_up(planned)
    assert kinds(caplog) == ["planned_again"]


@pytest.mark.parametrize("given", [{"backward_order": "any"}, {"watch": False}, {"by_turns": True}])
def test_no_order_is_planned_for_where_it_is_no_rule(given: dict[str, Any]) -> None:
    planned = planned_with(given.get("backward_order"), watch=given.get("watch"))
    sequence = planned.sequence
    for number in range(5):
        planned.zero_grad()
        (in_turn if "by_turns" in given and number == 1 else added_up)(planned)
    assert planned.budget.backward_order == "any"
    assert planned.sequence is sequence


def test_a_backward_in_another_order_is_warned_of_and_then_any_order_is_planned_for(caplog) -> None:
    planned = planned_with("reverse")
    limit = planned.mem_limit
    over = peak_of(planned, in_turn)
    (record,) = logged(caplog, "other_backward_order", forwards=2, mem_limit=limit)
    assert limit < over <= record.__dict__["numbers"]["peak_bytes"]
    for step in (in_turn, added_up):
        assert peak_of(planned, step) <= limit
        assert exact(planned, step)
    assert planned.budget.backward_order == "any"
    assert kinds(caplog) == ["other_backward_order"]
    caplog.clear()
    roomy = planned_with("reverse")
    roomy.compute_sequence("1GB")
    for step in (in_turn, added_up):
        assert peak_of(roomy, step) <= roomy.budget.peak_bytes(roomy.sequence)
    assert said_in(caplog) == []


@pytest.mark.slow
@pytest.mark.parametrize("order", ["any", "reverse"])
def test_kept_gradients_wait_beside_those_of_the_step(order: str, caplog) -> None:
    """One pass adds up the gradients of both forwards before it adds them to those that are there."""
    planned = planned_with(order, fresh_grads=False)
    for _ in range(3):
        added_up(planned)
        there = [*planned.parameters(), *(parameter.grad for parameter in planned.parameters())]
        peak = measured_peak(lambda: added_up(planned), there, CPU)
        assert peak <= planned.budget.peak_bytes(planned.sequence) <= planned.mem_limit
    assert said_in(caplog) == []


@pytest.mark.slow
def test_order_and_limit_may_be_set_later() -> None:
    planned = planned_with("any", watch=False)
    limit, slower = planned.mem_limit, planned.report().step_seconds
    planned.backward_order = "reverse"
    assert peak_of(planned, added_up) <= limit
    assert planned.report().step_seconds < slower
    planned.backward_order = "any"
    assert peak_of(planned, in_turn) <= limit


def test_a_file_has_all_sequences_and_the_order(tmp_path: Path, caplog) -> None:
    planned, path = planned_with("reverse"), tmp_path / "plan.json"
    planned.save_plan(path)
    loaded = Checkpointable(made("chain"), plan=path)
    assert loaded.sequence == planned.sequence
    assert loaded.budget == planned.budget
    assert str(loaded.report()) == str(planned.report())
    assert peak_of(loaded, added_up) <= planned.mem_limit
    assert exact(loaded, added_up)
    for _ in range(2):
        peak_of(loaded, in_turn)
    assert len(said_in(caplog)) == len(logged(caplog, "other_backward_order")) == 1
    assert loaded.sequence == planned.sequence
