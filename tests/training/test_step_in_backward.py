"""`step_in_backward`: the numbers of plain training, bit for bit, in less memory."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from rotor_py import Checkpointable
from rotor_solver import store_all
from tests.capture.steps import adamw
from tests.checkpointable.steps import between, square
from tests.training.stepping import Language, chain, same_parameters, same_state, stepping, tied, train, vectors, words

MOMENTUM = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **MOMENTUM)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    return torch.optim.Adam([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)


@pytest.mark.parametrize(
    ("model", "batches", "make"),
    [
        (chain(), vectors(), adamw),
        (tied(), words(), two_groups),
        (Language(tied=True, blocks=3), words(), adamw),
    ],
)
def test_parameters_and_state_are_those_of_plain_training_inside_the_limit(model, batches, make) -> None:
    plain = copy.deepcopy(model)
    expected = make(plain)
    *_, plain_peak = train(plain, expected, batches, StepLR(expected, 1, 0.5))
    planned, optimizer = stepping(model, make, batches[0])
    untrained = copy.deepcopy(optimizer.state_dict())
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
    train(model, expected, batches)
    train(planned, optimizer, batches)
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
