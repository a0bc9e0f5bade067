"""What `step_in_backward` does not go together with: each is told in a sentence, before it does harm if it can be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.errors import PlanMismatchError
from rotor_py.plan.step_in_backward import SpentGradientError
from rotor_solver import Sequence, store_all
from tests.checkpointable.steps import said_in
from tests.fields import raises
from tests.training.stepping import chain, square, stepping, train, vectors

BATCH = torch.randn(8, 16)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def planned() -> Checkpointable:
    return stepping(chain(2, 16), sgd, BATCH)[0]


def copies(planned: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in planned.parameters()]


def unchanged(planned: Checkpointable, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(planned.parameters(), before, strict=True))


class Own(torch.optim.SGD):
    """Looks at all parameters together, for all that is known."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_that_does_not_step_each_parameter_by_itself_is_refused() -> None:
    model = chain(2, 16)
    with raises(ValueError, "excluded_together", name="differentiable"):
        Checkpointable(model, step_in_backward=torch.optim.SGD(model.parameters(), differentiable=True))
    for kind in (torch.optim.LBFGS, Own):
        with raises(ValueError, "unsupported_optimizer", name=kind.__name__):
            Checkpointable(model, step_in_backward=kind(model.parameters()))
    Checkpointable(model, step_in_backward=type("Named", (torch.optim.SGD,), {})(model.parameters()))  # by name alone


def test_a_second_backward_is_refused_before_it_steps(planned: Checkpointable) -> None:
    again = "CF_0, CF_1, Fe_2, Fe_3, L, B_3, B_2, Fe_1, B_1, Fe_0, B_0"
    for sequence in (store_all(planned.chain), Sequence.parse(again)):
        planned.sequence = sequence
        loss = square(planned(BATCH))
        loss.backward(retain_graph=True)
        before = copies(planned)
        with pytest.raises(RuntimeError):
            loss.backward()
        assert unchanged(planned, before)
        planned.step_in_backward.step()
    square(planned(BATCH)).backward()
    before, loss = copies(planned), square(planned(BATCH))
    with raises(RuntimeError, "second_backward"):  # through another graph
        loss.backward()
    assert unchanged(planned, before)
    planned.step_in_backward.step()
    square(planned(BATCH)).backward()
    assert not unchanged(planned, before)


def in_flight(planned: Checkpointable) -> None:
    held = planned(BATCH)
    planned(BATCH)
    del held


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda planned: square(planned(BATCH)).backward(create_graph=True), "create_graph"),
        (in_flight, "forwards_in_flight"),
        (lambda planned: [square(planned.model(BATCH)).backward(), planned(BATCH)], "gradients_left"),
        (lambda planned: torch.amp.GradScaler("cpu").scale(square(planned(BATCH))).backward(), "scaled_loss"),
    ],
)
def test_a_step_that_would_go_wrong_is_refused_before_it_steps(planned: Checkpointable, wrong: Any, kind: str) -> None:
    before = copies(planned)
    with raises(RuntimeError, kind):
        wrong(planned)
    assert unchanged(planned, before)
    planned.zero_grad()
    torch.amp.GradScaler("cpu", enabled=False).scale(square(planned(BATCH))).backward()
    assert not unchanged(planned, before)


def scaler_of_another_loss() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


READERS: dict[str, Any] = {
    "clip the norm": lambda planned: nn.utils.clip_grad_norm_(planned.parameters(), 1.0),
    "clip values": lambda planned: nn.utils.clip_grad_value_(planned.parameters(), 1.0),
    "read": lambda planned: next(planned.parameters()).grad.norm(),
    "accumulate": lambda planned: square(planned.model(BATCH)).backward(),
    "another optimizer": lambda planned: torch.optim.SGD(planned.parameters(), lr=0.1).step(),
    "scaler": lambda planned: scaler_of_another_loss().unscale_(planned.step_in_backward),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_a_gradient_that_is_gone_is_told(planned: Checkpointable, reader: str) -> None:
    square(planned(BATCH)).backward()
    with raises(SpentGradientError, "gradient_spent"):
        READERS[reader](planned)


def test_gradients_that_are_gone_take_no_memory_and_go_with_the_step(planned: Checkpointable) -> None:
    parameters = list(planned.parameters())
    square(planned(BATCH)).backward()
    assert [each.grad.shape for each in parameters if each.grad is not None] == [each.shape for each in parameters]
    assert "ConsumedGradient" in repr(parameters[0].grad)
    planned.step_in_backward.step()
    assert all(each.grad is None for each in parameters)
    square(planned(BATCH)).backward()
    planned.step_in_backward.zero_grad()
    assert all(each.grad is None for each in parameters)


def test_hooks_of_the_optimizer_and_schedulers_see_one_step(planned: Checkpointable) -> None:
    optimizer, steps = planned.step_in_backward, []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.register_step_post_hook(lambda *unused: steps.append(1))
    for number in range(3):
        list(train(planned, optimizer, [BATCH], scheduler))  # a warning of the scheduler would be an error
        assert len(steps) == number + 1


class Borrows(nn.Module):
    """Uses the weight of a layer without training it; the layer is its own if it is `registered`."""

    def __init__(self, other: nn.Linear, *, registered: bool) -> None:
        super().__init__()
        self.other = nn.ModuleList([other]) if registered else [other]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.other[0].weight.detach()


def borrowing(*, registered: bool) -> nn.Sequential:
    last = nn.Linear(16, 16)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), Borrows(last, registered=registered), nn.Tanh(), last)


def test_a_parameter_that_an_earlier_stage_has_detached_waits_for_it_and_another_layers_is_refused() -> None:
    foreign = borrowing(registered=False)
    with raises(UnsupportedModelError, "foreign_parameter", name="2"):
        Checkpointable(foreign, loss=square, step_in_backward=sgd(foreign)).measure(BATCH)
    plain = borrowing(registered=True)
    planned, optimizer = stepping(plain, sgd, BATCH)
    list(train(plain, sgd(plain), [BATCH, BATCH]))
    planned.sequence = Sequence.parse("CF_0, CF_1, CF_2, Fe_3, Fe_4, L, B_4, B_3, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0")
    list(train(planned, optimizer, [BATCH, BATCH]))
    assert unchanged(planned, copies(plain))
    planned.sequence = store_all(planned.chain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as PyTorch says it of any graph
        square(planned(BATCH)).backward()


def test_a_plan_file_is_for_the_optimizer_that_steps(tmp_path: Path, caplog) -> None:
    file = tmp_path / "plan.json"
    model = chain(3, 16)
    planned, _ = stepping(model, sgd, BATCH, 10**6)
    planned.compute_sequence()
    planned.save_plan(file)
    others = None, torch.optim.Adam(model.parameters()), torch.optim.SGD(model[0].parameters(), momentum=0.9)
    plain = Checkpointable(model, BATCH, 10**6, loss=square).plan()
    for plan, other in (*((file, other) for other in others), (plain, sgd(model))):
        with raises(PlanMismatchError, "plan_for_other_model"):
            Checkpointable(model, plan=plan, step_in_backward=other)
    optimizer = sgd(model)
    loaded = Checkpointable(model, plan=file, step_in_backward=optimizer)
    assert loaded.budget == planned.budget
    before = copies(loaded)
    list(train(loaded, optimizer, [BATCH]))
    assert not unchanged(loaded, before)
    assert said_in(caplog) == []


def test_the_first_step_makes_the_optimizers_state_and_is_no_overrun(caplog) -> None:
    planned, optimizer = stepping(chain(), lambda model: torch.optim.Adam(model.parameters()), vectors(1)[0])
    planned.compute_sequence(planned.budget.least_bytes())
    for batch in vectors(3):
        square(planned(batch)).backward()
        optimizer.step()
    assert said_in(caplog) == []
