"""`step_in_backward`: the numbers of plain training, bit for bit, in less memory; and what is refused beside it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.errors import PlanMismatchError
from rotor_py.plan.step_in_backward import SpentGradientError
from rotor_solver import Sequence, store_all
from tests.capture.steps import adamw
from tests.checkpointable.steps import Made, between, said_in, square, step_peak
from tests.execute.test_moving import same
from tests.fields import raises
from tests.training.loop import differences, flat
from tests.training.stepping import Language

Make = Callable[[nn.Module], torch.optim.Optimizer]
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def chain(count: int = 6, width: int = 96) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)])


def tied(words: int = 120, width: int = 48) -> nn.Sequential:
    made = nn.Sequential(nn.Embedding(words, width), *chain(4, width), nn.Linear(width, words, bias=False))
    made[-1].weight = made[0].weight
    return made


def words(count: int = 3) -> list[torch.Tensor]:
    return [torch.randint(0, 120, (4, 16)) for _ in range(count)]


def vectors(count: int = 3, width: int = 96) -> list[torch.Tensor]:
    return [torch.randn(64, width) for _ in range(count)]


def train(network: nn.Module, optimizer: Any, batches: list[torch.Tensor], scheduler: Any = None) -> list[int]:
    """The measured peaks of the steps of a loop as anybody writes it."""
    peaks = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        peaks.append(step_peak(network, batch, optimizer))
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return peaks


def same_parameters(found: nn.Module, expected: nn.Module) -> bool:
    return same(found.parameters(), expected.parameters())


def same_state(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> bool:
    return not differences(flat(found.state_dict()), flat(expected.state_dict()))


def stepping(model: nn.Module, make: Make, batch: Any, limit: Any = None, **options: Any) -> tuple[Checkpointable, Any]:
    """A copy of `model` that is stepped in the backward, and its optimizer."""
    model = copy.deepcopy(model)
    optimizer = make(model)
    found = Checkpointable(model, batch, limit, step_in_backward=optimizer, loss=square, progress=False, **options)
    return found, optimizer


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **MOMENTUM)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    return torch.optim.Adam([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)


@pytest.mark.parametrize(
    ("model", "batches", "make"),
    [(chain(), vectors(), adamw), (tied(), words(), two_groups), (Language(tied=True, blocks=3), words(), adamw)],
)
def test_parameters_and_state_are_those_of_plain_training_inside_the_limit(model, batches, make) -> None:
    plain = copy.deepcopy(model)
    expected = make(plain)
    *_, plain_peak = train(plain, expected, batches, StepLR(expected, 1, 0.5))
    planned, optimizer = stepping(model, make, batches[0])
    untrained, steps = copy.deepcopy(optimizer.state_dict()), []
    optimizer.register_step_post_hook(lambda *unused: steps.append(1))
    for share in (0.0, 0.5, 1.0):
        planned.load_state_dict(model.state_dict())
        optimizer.load_state_dict(untrained)
        limit = between(planned, share)
        planned.compute_sequence(limit)
        peaks = train(planned, optimizer, batches, StepLR(optimizer, 1, 0.5))
        assert same_parameters(planned, plain)
        assert same_state(optimizer, expected)
        assert all(each.grad is None for each in planned.parameters())
        predicted = planned.budget.peak_bytes(planned.sequence)
        assert max(peaks) <= predicted <= limit
        assert max(peaks) > 0.97 * predicted
        # Where all is stored, the peak may be where the backward begins, before there are gradients.
        assert share == 1.0 or max(peaks) < plain_peak
    assert len(steps) == 3 * len(batches)


def test_gradients_leave_the_budget_stage_by_stage_where_shared_after_their_last_use(tmp_path: Path) -> None:
    model, batch = chain(), vectors(1)[0]
    kept = Checkpointable(copy.deepcopy(model), batch, loss=square, optimizer=adamw(model), fresh_grads=True)
    freed, _ = stepping(model, adamw, batch)
    assert freed.budget.fixed.gradients == 0
    assert not any(stage.gradient for stage in freed.budget.chain.stages)
    gradients = sum(each.nbytes for each in model.parameters())
    assert freed.budget.freed_gradients == gradients
    assert kept.budget.least_bytes() - freed.budget.least_bytes() > 0.5 * gradients
    freed.report().to_html(tmp_path / "plan.html")
    for said in (freed.summary(), str(freed.report()), (tmp_path / "plan.html").read_text(encoding="utf-8")):
        assert "gradients are freed in the backward" in said
    model, _ = stepping(tied(), adamw, words(1)[0])
    shared = model.model[0].weight.nbytes
    assert [stage.gradient for stage in model.chain.stages] == [-shared, *[0] * (len(model.chain) - 2), shared]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", MOMENTUM),
        ("AdamW", {"foreach": True}),
        ("Adam", {"fused": True}),
        ("Adam", {"amsgrad": True}),
        ("RMSprop", {"momentum": 0.5}),
        *((name, {}) for name in ("NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "Rprop", "Adafactor", "Muon")),
        ("ASGD", {"lambd": 0.1, "t0": 1}),
    ],
)
def test_every_optimizer_that_is_taken_steps_each_parameter_by_itself(name: str, options: dict[str, Any]) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip("Muon is new in torch 2.9")
    model, batches = nn.Sequential(*[nn.Linear(16, 16, bias=name != "Muon") for _ in range(2)]), vectors(3, 16)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(model.parameters(), **options)

    planned, optimizer = stepping(model, make, batches[0])
    expected = make(model)
    for network, own in ((model, expected), (planned, optimizer)):
        for batch in batches:
            square(network(batch)).backward()
            own.step()
            own.zero_grad()
    assert same_parameters(planned, model)
    assert same_state(optimizer, expected)


def test_frozen_parameters_and_those_of_other_optimizers_stay_as_they_are() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*model[1].parameters(), *model[2].parameters(), extra], lr=1e-2)

    extra = nn.Parameter(torch.ones(3))
    model, batch = chain(4, 32), vectors(1, 32)[0]
    model[2].requires_grad_(False)
    planned, optimizer = stepping(model, make, batch)
    others = [*planned.model[0].parameters(), *planned.model[3].parameters()]
    assert planned.budget.fixed.gradients == sum(each.nbytes for each in others)
    extra.grad = torch.ones(3)
    before = copy.deepcopy(planned.model)
    square(planned(batch)).backward()
    assert all(each.grad is not None and each.grad.abs().sum() for each in others)  # read, as ever
    assert torch.equal(extra, torch.ones(3))
    changed = [not torch.equal(a, b) for a, b in zip(planned.parameters(), before.parameters(), strict=True)]
    assert changed == [False, False, True, True, False, False, False, False]
    optimizer.step()
    assert not torch.equal(extra, torch.ones(3))


def test_a_closure_steps_in_its_backward_after_hooks_of_gradients() -> None:
    model, batch = chain(2, 16), vectors(1, 16)[0]
    planned, optimizer = stepping(model, momentum, batch)
    for network, own in ((model, momentum(model)), (planned, optimizer)):
        for each in network.parameters():
            each.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))

        def closure(network: nn.Module = network, own: torch.optim.Optimizer = own) -> torch.Tensor:
            own.zero_grad()
            loss = square(network(batch))
            loss.backward()
            return loss

        for _ in range(2):
            own.step(closure)
    assert same_parameters(planned, model)


def test_training_goes_on_from_a_checkpoint() -> None:
    model, batches = chain(2, 16), vectors(4, 16)
    first, optimizer = stepping(model, adamw, batches[0])
    train(model, adamw(model), batches)
    train(first, optimizer, batches[:2])
    second, resumed = stepping(chain(2, 16), adamw, batches[0])
    square(second(batches[0])).backward()  # a step of other weights, so that groups are known that are made anew
    resumed.step()
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train(second, resumed, batches[2:])
    assert same_parameters(second, model)


def test_a_copy_is_stepped_by_its_own_optimizer_and_other_backwards_leave_gradients_as_ever() -> None:
    planned, optimizer = stepping(chain(2, 16), momentum, vectors(1, 16)[0])
    batch = vectors(1, 16)[0]
    train(planned, optimizer, [batch])
    before, twin = [each.clone() for each in planned.parameters()], copy.deepcopy(planned)
    square(twin(batch)).backward()
    assert twin.step_in_backward is not optimizer
    assert not any(map(torch.equal, twin.parameters(), before))
    square(planned(batch))  # its backward never comes
    square(planned.model(batch)).backward()
    gradients = [each.grad for each in planned.parameters()]
    assert all(each.abs().sum() for each in gradients)
    planned.zero_grad()
    found = torch.autograd.grad(square(planned(batch)), list(planned.parameters()))
    assert all(map(torch.equal, found, gradients))
    assert all(map(torch.equal, planned.parameters(), before))


def test_an_optimizer_that_gets_more_parameters_is_planned_for() -> None:
    def first_layer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[0].parameters(), lr=0.1)

    planned, optimizer = stepping(chain(3, 16), first_layer, vectors(1, 16)[0], 10**6)
    train(planned, optimizer, vectors(1, 16))
    planned.zero_grad()
    optimizer.add_param_group({"params": list(planned.model[2].parameters())})
    train(planned, optimizer, vectors(1, 16))
    stepped = [*planned.model[0].parameters(), *planned.model[2].parameters()]
    assert planned.budget.freed_gradients == sum(each.nbytes for each in stepped)


def test_by_hand_checkpoints_are_stepped_as_well() -> None:
    model, batches = chain(), vectors(2)
    planned, optimizer = stepping(model, adamw, batches[0], every_n_layers=2)
    train(model, adamw(model), batches)
    peaks = train(planned, optimizer, batches)
    assert planned.sequence != store_all(planned.budget.chain)
    assert max(peaks) <= planned.budget.peak_bytes(planned.sequence)
    assert same_parameters(planned, model)


# What does not go together with it is told in a sentence, before it does harm if it can be.

BATCH = torch.randn(8, 16)


@pytest.fixture
def planned() -> Checkpointable:
    return stepping(chain(2, 16), momentum, BATCH)[0]


def copies(planned: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in planned.parameters()]


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
        assert same(planned.parameters(), before)
        planned.step_in_backward.step()
    square(planned(BATCH)).backward()
    before, loss = copies(planned), square(planned(BATCH))
    with raises(RuntimeError, "second_backward"):  # through another graph
        loss.backward()
    assert same(planned.parameters(), before)
    planned.step_in_backward.step()
    square(planned(BATCH)).backward()
    assert not same(planned.parameters(), before)


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
    assert same(planned.parameters(), before)
    planned.zero_grad()
    torch.amp.GradScaler("cpu", enabled=False).scale(square(planned(BATCH))).backward()
    assert not same(planned.parameters(), before)


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


class Borrows(Made):
    """Uses the weight of a layer without training it; the layer is its own if it is in an `nn.ModuleList`."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.other[0].weight.detach()


def borrowing(*, registered: bool) -> nn.Sequential:
    last = nn.Linear(16, 16)
    borrows = Borrows(other=nn.ModuleList([last]) if registered else [last])
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), borrows, nn.Tanh(), last)


def test_a_parameter_that_an_earlier_stage_has_detached_waits_for_it_and_another_layers_is_refused() -> None:
    foreign = borrowing(registered=False)
    with raises(UnsupportedModelError, "foreign_parameter", name="2"):
        Checkpointable(foreign, loss=square, step_in_backward=momentum(foreign)).measure(BATCH)
    plain = borrowing(registered=True)
    planned, optimizer = stepping(plain, momentum, BATCH)
    list(train(plain, momentum(plain), [BATCH, BATCH]))
    planned.sequence = Sequence.parse("CF_0, CF_1, CF_2, Fe_3, Fe_4, L, B_4, B_3, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0")
    list(train(planned, optimizer, [BATCH, BATCH]))
    assert same_parameters(planned, plain)
    planned.sequence = store_all(planned.chain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as PyTorch says it of any graph
        square(planned(BATCH)).backward()


def test_a_plan_file_is_for_the_optimizer_that_steps(tmp_path: Path, caplog) -> None:
    file = tmp_path / "plan.json"
    model = chain(3, 16)
    planned, _ = stepping(model, momentum, BATCH, 10**6)
    planned.compute_sequence()
    planned.save_plan(file)
    others = None, torch.optim.Adam(model.parameters()), torch.optim.SGD(model[0].parameters(), momentum=0.9)
    plain = Checkpointable(model, BATCH, 10**6, loss=square).plan()
    for plan, other in (*((file, other) for other in others), (plain, momentum(model))):
        with raises(PlanMismatchError, "plan_for_other_model"):
            Checkpointable(model, plan=plan, step_in_backward=other)
    optimizer = momentum(model)
    loaded = Checkpointable(model, plan=file, step_in_backward=optimizer)
    assert loaded.budget == planned.budget
    before = copies(loaded)
    list(train(loaded, optimizer, [BATCH]))
    assert not same(loaded.parameters(), before)
    assert said_in(caplog) == []


def test_the_first_step_makes_the_optimizers_state_and_is_no_overrun(caplog) -> None:
    planned, optimizer = stepping(chain(), lambda model: torch.optim.Adam(model.parameters()), vectors(1)[0])
    planned.compute_sequence(planned.budget.least_bytes())
    for batch in vectors(3):
        square(planned(batch)).backward()
        optimizer.step()
    assert said_in(caplog) == []
