"""Stages that save oddly, and steps that go oddly, with activations in a file: the bits of plain training."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rotor_profiling.step import measured_peak
from rotor_py import Checkpointable
from tests.execute.test_moving import settle

WIDTH, ROWS = 64, 256
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


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: x.tanh().exp(), x, use_reentrant=False).sin()


def dropping(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x.tanh().exp(), 0.3)


STAGES: dict[str, Callable[[], nn.Module]] = {
    "saved twice": lambda: Stage(lambda x: Twice.apply(x.tanh())),
    "views of one storage": lambda: Stage(views),
    "checkpointed inside": lambda: Stage(checkpointed),
    "handed on": lambda: Handing(torch.tanh),
    "output is a view": lambda: ViewOfSaved(lambda x: x.tanh().exp()),
}


def chain(make: Callable[[], nn.Module] = lambda: Stage(dropping)) -> nn.Sequential:
    torch.manual_seed(0)
    stages = [make() for _ in range(4)]
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
    monkeypatch.setattr("rotor_py.offload.offload.measure_bandwidth", lambda *_: 1e13)

    def plan(model: nn.Module) -> Checkpointable:
        found = Checkpointable(
            model, batch(), 10**9, loss=loss_of, fresh_grads=True, watch=False, cache=False, offload=f"file:{tmp_path}"
        )
        report = found.report()
        least = report.budget.least_bytes()
        found.compute_sequence(int(least + SHARE * (report.store_all_bytes - least)))
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
    with ThreadPoolExecutor() as pool:
        pool.submit(loss.backward).result()


def test_odd_backwards_and_hooks_of_the_user_are_exact(planned: Callable[[nn.Module], Checkpointable]) -> None:
    model = planned(chain())
    for backward in (twice, in_a_thread):
        assert same(gradients(model, backward), gradients(chain(), backward))
        assert tier_of(model).held_bytes == 0
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(model), gradients(chain()))


def test_errors_and_forwards_without_a_backward_cost_that_step_only(
    planned: Callable[[nn.Module], Checkpointable],
) -> None:
    model, expected = planned(chain()), gradients(chain())

    def again(loss: torch.Tensor) -> None:
        loss.backward()
        loss.backward()

    with pytest.raises(RuntimeError, match="second time"):
        gradients(model, again)
    assert same(gradients(model), expected)
    assert tier_of(model).held_bytes == 0

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    for stage in (0, 2, 3):
        hook = model.model[stage].up.weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            gradients(model)
        hook.remove()
        # Until the next backward, PyTorch holds the graph of the one that failed; it does so without a plan as well.
        assert same(gradients(model), expected)
        gc.collect()
        settle(tier_of(model))
    for _ in range(3):
        model(batch())
    settle(tier_of(model))
    assert same(gradients(model), expected)


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
    models, plain = [planned(chain()) for _ in range(2)], gradients(chain())
    losses = []
    for model in models:
        torch.manual_seed(5)
        losses.append(loss_of(model(batch())))
    for loss in losses:  # both are under way at once
        loss.backward()
    for model, loss in zip(models, losses, strict=True):
        assert same([loss, *(parameter.grad for parameter in model.parameters())], plain)
        assert tier_of(model).moved_bytes
    assert list(tmp_path.iterdir()) == []
