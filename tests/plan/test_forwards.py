"""Several forwards before a backward: planned for if told, noticed if not; where they do not fit, warned of."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_solver import InfeasibleError, Sqrt, store_all
from tests.checkpointable.steps import CPU, between
from tests.fields import logged, raises

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it
ROWS = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


class Tower(nn.Module):
    """No chain: TorchDynamo captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
        return value


def chain() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "captured": Tower}


def planned_at(share: float, kind: str = "chain", forwards: int = 1) -> Checkpointable:
    torch.manual_seed(0)
    # Not watched: two at once cannot measure memory.
    planned = Checkpointable(MODELS[kind](), fresh_grads=True, forwards_in_flight=forwards, watch=False)
    planned.measure(ROWS)
    planned.compute_sequence(between(planned, share))
    return planned


def added_up(network: nn.Module, forwards: int = 2) -> None:
    """Outputs are held to the end, as the prediction has it. The backwards come in reverse."""
    outputs = [network((1 + number) * ROWS) for number in range(forwards)]
    sum(output.mean() for output in outputs).backward()  # type: ignore[union-attr] # not an int


def one_after_the_other(network: nn.Module, forwards: int = 2) -> None:
    """The backwards come in the order of the forwards, as in a pipeline."""
    outputs = [network((1 + number) * ROWS) for number in range(forwards)]
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


STEPS = [added_up, one_after_the_other, rolling]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those about forwards. Gradients that are kept, or a graph, are told of as well."""
    found = [record.getMessage() for record in caplog.records if record.name == "rotor_py"]
    return [said for said in found if "in flight" in said]


def peak_of(planned: Checkpointable, step: Callable[[], object]) -> int:
    planned.zero_grad()
    return measured_peak(step, planned.parameters(), CPU)  # every forward has an input of its own


def same_gradients(planned: Checkpointable, kind: str, step: Callable[[nn.Module], object]) -> bool:
    torch.manual_seed(0)
    plain = MODELS[kind]()
    step(plain)
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    return all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize(("forwards", "share"), [(2, 0.0), (2, 0.3), (4, 1.0)])
@pytest.mark.parametrize("kind", MODELS)
def test_forwards_that_were_told_stay_inside_the_limit_in_any_order(
    kind: str, share: float, forwards: int, caplog: pytest.LogCaptureFixture
) -> None:
    planned = planned_at(share, kind, forwards)
    assert planned.budget is not None
    assert planned.sequence is not None
    predicted = planned.budget.peak_bytes(planned.sequence)
    assert predicted <= planned.mem_limit
    for step in STEPS:
        measured = peak_of(planned, lambda step=step: step(planned, forwards))
        assert measured <= predicted
        assert measured > 0.8 * predicted or step is not added_up or share != 0.3  # the prediction is close
        assert same_gradients(planned, kind, lambda plain, step=step: step(plain, forwards))
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_over_its_limit_is_warned_of_and_the_next_is_inside(
    kind: str, step: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    planned = planned_at(0.7, kind)
    first = peak_of(planned, lambda: step(planned))
    over, *others = warnings_of(caplog)
    assert over.startswith("2 forwards of ")
    assert f"({planned.mem_limit} bytes). Say forwards_in_flight=2 (--forwards-in-flight 2), and" in over
    predicted = int(re.findall(r"up to [^(]*\((\d+) bytes\)", over)[0])
    assert planned.mem_limit < first <= predicted
    second = peak_of(planned, lambda: step(planned))
    assert second <= planned.mem_limit
    assert same_gradients(planned, kind, step)
    (again,) = warnings_of(caplog)[1 + len(others) :] or others  # a rolling step ends with none in flight
    assert again.startswith("planning again: 2 forwards of ")


def test_the_step_that_shows_them_is_kept_inside_where_that_is_possible(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_at(1.0)
    planned.compute_sequence(int(1.6 * planned.mem_limit))  # all is stored, and some of the limit is left
    for _ in range(3):
        assert peak_of(planned, lambda: added_up(planned)) <= planned.mem_limit
        assert same_gradients(planned, "chain", added_up)
    (said,) = warnings_of(caplog)
    assert said.startswith("planning again: 2 forwards of Sequential")


def test_more_at_once_than_before_are_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_at(0.7, forwards=2)
    planned.compute_sequence(int(1.2 * planned.mem_limit))
    added_up(planned)
    assert warnings_of(caplog) == []
    added_up(planned, 3)
    assert peak_of(planned, lambda: added_up(planned, 3)) <= planned.mem_limit
    assert same_gradients(planned, "chain", lambda plain: added_up(plain, 3))
    assert warnings_of(caplog)[-1].startswith("planning again: 3 forwards")


def test_where_no_plan_leaves_room_training_goes_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_at(0.0)
    for _ in range(3):
        planned.zero_grad()
        added_up(planned)
        assert same_gradients(planned, "chain", added_up)
    over, again, beyond = warnings_of(caplog)
    assert "so the step takes up to" in over
    assert again.startswith("planning again")
    assert beyond.startswith("with 2 forwards in flight, training goes on beyond the limit: a training step needs at")
    least = int(re.findall(r"at least [^(]*\((\d+) bytes\)", beyond)[0])
    assert Checkpointable(chain(), ROWS, least, fresh_grads=True, forwards_in_flight=2).sequence is not None
    with pytest.raises(InfeasibleError) as refused:
        Checkpointable(chain(), ROWS, least - 1, fresh_grads=True, forwards_in_flight=2)
    assert refused.value.min_bytes == least


def test_a_sequence_of_the_user_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_at(0.7)
    planned.sequence = store_all(planned.chain)
    for _ in range(2):
        planned.zero_grad()
        added_up(planned)
        assert planned.sequence == store_all(planned.chain)
    assert warnings_of(caplog) == [each.getMessage() for each in logged(caplog, "forwards_over_limit")]
    assert len(warnings_of(caplog)) == 1


def test_several_kinds_of_steps_in_flight_together(caplog: pytest.LogCaptureFixture) -> None:
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
        assert peak_of(planned, lambda: step(planned)) <= limit
        assert same_gradients(planned, "chain", step)
    assert len(warnings_of(caplog)) == said


@pytest.mark.parametrize("forwards", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_forwards_is_refused(forwards: Any) -> None:
    with raises(ValueError, "not_a_count", name="forwards_in_flight"):
        Checkpointable(chain(), forwards_in_flight=forwards)
    planned = Checkpointable(chain())
    with raises(ValueError, "not_a_count", name="forwards_in_flight"):
        planned.forwards_in_flight = forwards
    assert planned.forwards_in_flight == 1


def test_a_number_set_later_counts_from_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_at(0.7)
    planned.forwards_in_flight = 2
    assert peak_of(planned, lambda: added_up(planned)) <= planned.mem_limit
    assert warnings_of(caplog) == []


def test_other_algorithms_leave_room_too() -> None:
    planned = planned_at(0.7, forwards=2)
    planned.compute_sequence(algo=Sqrt())
    assert peak_of(planned, lambda: added_up(planned)) <= planned.mem_limit


def each_its_backward(planned: Checkpointable) -> None:
    for _ in range(3):
        planned(ROWS).mean().backward()


def outputs_kept(planned: Checkpointable) -> list[torch.Tensor]:
    outputs = []
    for _ in range(3):
        outputs.append(planned(ROWS))
        outputs[-1].mean().backward()
    return outputs


def dropped(planned: Checkpointable) -> None:
    planned(ROWS)
    gc.collect()
    planned(ROWS).mean().backward()


def without_gradients(planned: Checkpointable) -> torch.Tensor:
    with torch.no_grad():
        first = planned(ROWS)
    planned.eval()
    second = planned(ROWS)
    planned.train()
    planned(ROWS).mean().backward()
    return first + second.detach()


def retained(planned: Checkpointable) -> None:
    output = planned(ROWS)
    for _ in range(2):
        output.mean().backward(retain_graph=True)
    del output  # and the graph with it
    torch.autograd.grad(planned(ROWS).mean(), list(planned.parameters()))
    planned(ROWS).mean().backward()


@pytest.mark.parametrize("step", [each_its_backward, outputs_kept, dropped, without_gradients, retained])
def test_forwards_that_are_not_in_flight_do_not_count(
    step: Callable[[Checkpointable], object], caplog: pytest.LogCaptureFixture
) -> None:
    planned = planned_at(0.5)
    step(planned)
    assert warnings_of(caplog) == []


def test_a_forward_whose_graph_is_retained_is_still_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_at(0.5)
    output = planned(ROWS)
    output.mean().backward(retain_graph=True)
    measured = measured_peak(lambda: planned(ROWS).mean().backward(), [*planned.parameters(), ROWS], CPU)
    (said,) = warnings_of(caplog)
    assert said.startswith("2 forwards of ")
    assert measured + planned.memory().kept_bytes > planned.mem_limit
    output.mean().backward()


def test_a_strategy_by_hand_without_a_limit_is_never_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    planned = Checkpointable(chain(), every_n_layers=2)
    added_up(planned)
    assert warnings_of(caplog) == []
