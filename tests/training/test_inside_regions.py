"""Planned models inside of the caller's own regions, which `torch.utils.checkpoint` runs again in the backward."""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from tests.checkpointable.steps import CPU, Tower, planned_at, square
from tests.fields import logged, raises

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a region in another
WIDTH, ROWS = 32, 256


def chain() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)])


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "captured": lambda: Tower(WIDTH, 4, 0.1)}
Step = Callable[[nn.Module, nn.Module, torch.Tensor], torch.Tensor]


def saving_products(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


region = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)
selective = partial(region, context_fn=partial(create_selective_checkpoint_contexts, saving_products))


def beside(run: Callable[..., Any], one: nn.Module, two: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The second model in a region, and beside it; the other one first."""
    return run(two, one(batch)).square().mean() + two(batch).square().mean()


def with_more(run: Callable[..., Any], one: nn.Module, two: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """In a region with other operators around, for whose backward all of it runs again; and beside it."""
    return run(lambda each: two(one(each.sin()).tanh()).sin(), batch).square().mean() + two(batch).square().mean()


def nested(run: Callable[..., Any], one: nn.Module, two: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """In a region of a region, and beside it."""

    def inner(each: torch.Tensor) -> torch.Tensor:
        return two(each.cos()).tanh()

    def outer(each: torch.Tensor) -> torch.Tensor:
        return one(run(inner, each.sin()).exp()).cos()

    return run(outer, batch).square().mean() + two(batch).square().mean()


def two_regions(run: Callable[..., Any], one: nn.Module, two: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return run(lambda each: two(run(lambda each: two(each.sin()).cos(), each)).sin(), batch).square().mean()


def twice_in_one(run: Callable[..., Any], one: nn.Module, two: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return run(lambda each: two(two(each.sin()).cos()).sin(), batch).square().mean()


STEPS = [beside, with_more, nested, two_regions, twice_in_one]
RUNS: dict[str, Callable[..., Any]] = {"region": region, "reentrant": reentrant, "selective": selective}


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()


def planned_anew(kind: str, share: float) -> Checkpointable:
    return planned_at(share, MODELS[kind](), batch(), fresh_grads=True)


planned_once = cache(planned_anew)


def halfway(kind: str, share: float) -> Checkpointable:
    return copy.deepcopy(planned_once(kind, share))


def gradients(models: tuple[nn.Module, nn.Module], step: Step) -> list[Any]:
    torch.manual_seed(7)
    value = batch()
    for model in models:
        model.zero_grad()
    step(*models, value).backward()
    return [value.grad, *(each.grad for model in models for each in model.parameters()), torch.rand(1)]


def peak_of(planned: Checkpointable, loss: Callable[[torch.Tensor], torch.Tensor]) -> int:
    value = batch()
    planned.zero_grad()
    return measured_peak(lambda: loss(value).backward(), [*planned.parameters(), value], CPU)


def warned(caplog: pytest.LogCaptureFixture) -> bool:
    return any("mem_limit" in record.__dict__.get("numbers", ()) for record in caplog.records)


@pytest.mark.parametrize(
    ("kind", "share", "run", "step"),
    [
        *(("chain", 0.4, "region", step) for step in STEPS),
        ("chain", 0.4, "reentrant", nested),
        ("chain", 0.4, "selective", twice_in_one),
        *(("captured", 0.8, "region", step) for step in (beside, nested)),
    ],
)
def test_numbers_are_those_of_plain_training_in_every_step(kind: str, share: float, run: str, step: Step) -> None:
    make = halfway if kind == "chain" and run != "reentrant" else planned_anew
    planned = make(kind, share), make(kind, share)
    plain = copy.deepcopy((planned[0].model, planned[1].model))
    expected = gradients(plain, partial(step, RUNS[run]))
    for _ in range(3):  # the plan is another one after each of the first
        for found, right in zip(gradients(planned, partial(step, RUNS[run])), expected, strict=True):
            assert found is right or torch.equal(found, right)


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_planned_inside_of_a_selective_region_is_no_part_of_it(kind: str) -> None:
    # Operators of measuring would be taken for those of the first run.
    plain, planned = MODELS[kind](), Checkpointable(MODELS[kind](), mem_limit="1GB")
    planned.load_state_dict(plain.state_dict())
    step = partial(with_more, selective, nn.Identity())
    for _ in range(2):
        expected = gradients((plain, plain), lambda one, two, value: step(one, value))
        found = gradients((planned, planned), lambda one, two, value: step(one, value))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_is_all_of_a_region_follows_its_plan_and_runs_once(kind: str, caplog) -> None:
    planned = planned_anew(kind, 0.3)
    for _ in range(3):
        peak = peak_of(planned, lambda value: square(region(planned, value)))
        assert peak <= planned.budget.peak_bytes(planned.sequence) <= planned.mem_limit
    assert not warned(caplog)


def test_a_second_run_keeps_nothing_and_is_no_forward_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_anew("chain", 1.0)
    bare = peak_of(planned, lambda value: square(planned(value.sin()).sin()))
    inside = peak_of(planned, lambda value: square(region(lambda each: planned(each.sin()).sin(), value)))
    # The caller's two operators, and what one stage needs.
    assert inside - bare < 4 * ROWS * WIDTH * 4
    assert not logged(caplog, "forwards_over_limit")
    assert not logged(caplog, "planning_again", cause="forwards")


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_inside_the_limit_or_says_that_it_is_not(step: Step, caplog: pytest.LogCaptureFixture) -> None:
    planned = halfway("chain", 0.4)
    for _ in range(3):
        peak = peak_of(planned, lambda value: step(region, nn.Identity(), planned, value))
        assert peak <= planned.mem_limit or warned(caplog)


def test_a_plan_that_cannot_be_made_inside_of_a_backward_is_refused_in_a_sentence() -> None:
    def step(one: nn.Module, two: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return square(reentrant(two, one(batch)))

    one, two = (Checkpointable(chain(), mem_limit="1GB") for _ in range(2))
    with raises(RuntimeError, "profiler_in_backward"):
        gradients((one, two), step)
    one.zero_grad()
    two.measure(batch())
    gradients((one, two), step)
