"""Stages that save oddly, and steps that go oddly, with activations in a file: the bits of plain training."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rotor_profiling.step import measured_peak
from rotor_py import Checkpointable
from rotor_py.offload.offload import Bandwidth
from tests.execute.test_moving import settle

WIDTH, ROWS = 64, 512
SHARE = 0.3
"""Of what storing everything takes above the least, the part that the limit leaves."""


class Twice(torch.autograd.Function):
    """The square, which saves its input two times, and nothing of it a third time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x, x[:0])
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        one, other, _ = ctx.saved_tensors
        return gradient * one + gradient * other


class Stage(nn.Module):
    """`inside` goes from four times the width to as many."""

    def __init__(self, inside: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inside(self.up(x)))


class Handing(Stage):
    """Hands a tensor on that it has saved, and that the next stage saves."""

    def forward(self, both: Any) -> Any:
        x, before = both if isinstance(both, tuple) else (both, None)
        inside = self.up(x).tanh()
        return x + self.down(inside.exp() if before is None else inside.exp() * before.sin()), inside


class First(nn.Module):
    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return both[0]


class ViewOfSaved(Stage):
    """Returns a view of what it has saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().forward(x), x], -1).exp().log()[:, :WIDTH]


def views(x: torch.Tensor) -> torch.Tensor:
    one, two, three, four = x.tanh().chunk(4, -1)
    return torch.cat([one * two, three * four, one.sin(), two[:, 1:].cos(), two[:, :1]], -1)


def of_no_size(x: torch.Tensor) -> torch.Tensor:
    x = x.tanh()
    return x.exp() + (x[:0] * x[:0]).sum()


def other_dtypes(x: torch.Tensor) -> torch.Tensor:
    squared = torch.complex(x[:, ::2], torch.where(x > 0, x, 0.1 * x)[:, 1::2]).square().abs()
    return torch.cat([squared, squared.double().tanh().exp().float()], -1)


def written_to(x: torch.Tensor) -> torch.Tensor:
    x = x.tanh()
    return x.exp() * x.clone().mul_(2)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: x.tanh().exp(), x, use_reentrant=False).sin()


def dropping(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x.tanh().exp(), 0.3)


STAGES: dict[str, Callable[[], nn.Module]] = {
    "saved twice": lambda: Stage(lambda x: Twice.apply(x.tanh())),
    "views of one storage": lambda: Stage(views),
    "of no size": lambda: Stage(of_no_size),
    "other dtypes": lambda: Stage(other_dtypes),
    "written to": lambda: Stage(written_to),
    "checkpointed inside": lambda: Stage(checkpointed),
    "handed on": lambda: Handing(torch.tanh),
    "output is a view": lambda: ViewOfSaved(lambda x: x.tanh().exp()),
}


def chain(make: Callable[[], nn.Module] = lambda: Stage(dropping)) -> nn.Sequential:
    torch.manual_seed(0)
    stages = [make() for _ in range(5)]
    return nn.Sequential(*stages, First()) if isinstance(stages[0], Handing) else nn.Sequential(*stages)


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def gradients(model: nn.Module, backward: Callable[[torch.Tensor], object] = torch.Tensor.backward) -> list[Any]:
    torch.manual_seed(5)
    loss = loss_of(model(batch()))
    try:
        backward(loss)
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    finally:
        model.zero_grad()


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], Checkpointable]:
    """Plans a model for a disk so fast that moving always pays; something does move."""
    monkeypatch.setattr("rotor_py.offload.offload.measure_bandwidth", lambda *_: Bandwidth(1e13, 1e13))

    def plan(model: nn.Module) -> Checkpointable:
        found = Checkpointable(
            model, batch(), 10**9, loss=loss_of, fresh_grads=True, watch=False, cache=False, offload=f"file:{tmp_path}"
        )
        report = found.report()
        least = report.budget.least_bytes()
        found.compute_sequence(int(least + SHARE * (report.store_all_bytes - least)))
        assert found.sequence is not None
        assert found.sequence.moves is not None
        return found

    return plan


@pytest.mark.parametrize("kind", STAGES)
def test_stages_that_save_oddly_are_exact_and_inside_the_limit(
    kind: str, planned: Callable[[nn.Module], Checkpointable]
) -> None:
    model, expected = planned(chain(STAGES[kind])), gradients(chain(STAGES[kind]))
    for _ in range(2):
        assert same(gradients(model), expected)
    value = batch()
    peak = measured_peak(lambda: loss_of(model(value)).backward(), [*model.parameters(), value], torch.device("cpu"))
    assert peak <= model.report().peak_bytes <= int(model.mem_limit)  # type: ignore[arg-type] # it is in bytes
    assert tier_of(model).held_bytes == 0


def tier_of(model: Checkpointable) -> Any:
    return model._planner.model.offload.tier


def twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def in_a_thread(loss: torch.Tensor) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@pytest.mark.parametrize("backward", [twice, in_a_thread])
def test_odd_backwards_are_exact(
    backward: Callable[[torch.Tensor], None], planned: Callable[[nn.Module], Checkpointable]
) -> None:
    model = planned(chain())
    assert same(gradients(model, backward), gradients(chain(), backward))
    assert tier_of(model).held_bytes == 0


def test_what_the_user_does_with_saved_tensors_and_what_the_plan_does_go_together(
    planned: Callable[[nn.Module], Checkpointable],
) -> None:
    model = planned(chain())
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(model), gradients(chain()))


def test_a_second_backward_that_nobody_announced_is_refused_and_the_next_step_is_right(
    planned: Callable[[nn.Module], Checkpointable],
) -> None:
    model = planned(chain())

    def again(loss: torch.Tensor) -> None:
        loss.backward()
        loss.backward()

    with pytest.raises(RuntimeError, match="second time"):
        gradients(model, again)
    assert same(gradients(model), gradients(chain()))
    assert tier_of(model).held_bytes == 0


@pytest.mark.parametrize("stage", [0, 2, 4])
def test_an_error_in_the_middle_of_a_backward_costs_that_step_alone(
    stage: int, planned: Callable[[nn.Module], Checkpointable]
) -> None:
    model = planned(chain())

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    hook = model.model[stage].up.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        gradients(model)
    hook.remove()
    # Until the next backward, PyTorch holds the graph of the one that failed; it does so without a plan as well.
    assert same(gradients(model), gradients(chain()))
    gc.collect()
    settle(tier_of(model))


def test_forwards_without_a_backward_leave_nothing(planned: Callable[[nn.Module], Checkpointable]) -> None:
    model = planned(chain())
    for _ in range(5):
        model(batch())
    settle(tier_of(model))
    assert same(gradients(model), gradients(chain()))


def test_without_gradients_and_in_evaluation_nothing_moves(planned: Callable[[nn.Module], Checkpointable]) -> None:
    model, plain = planned(chain()), chain()
    before = tier_of(model).moved_bytes
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(1)
            expected = plain(batch())
            torch.manual_seed(1)
            assert torch.equal(model(batch()), expected)
    model.eval()
    assert same(gradients(model), gradients(plain.eval()))
    assert tier_of(model).moved_bytes == before


def test_two_models_share_a_folder_and_no_bytes(planned: Callable[[nn.Module], Checkpointable], tmp_path: Path) -> None:
    makes = [lambda: Stage(dropping), STAGES["views of one storage"]]
    models = [planned(chain(make)) for make in makes]
    losses = []
    for model in (*models, *(chain(make) for make in makes)):
        torch.manual_seed(5)
        losses.append((model, loss_of(model(batch()))))
    for _, loss in losses:  # both are under way at once
        loss.backward()
    found = [[parameter.grad for parameter in model.parameters()] for model, _ in losses]
    assert same(found[0], found[2])
    assert same(found[1], found[3])
    assert all(tier_of(model).moved_bytes for model in models)
    assert list(tmp_path.iterdir()) == []
