"""Stages that save oddly, and steps that go oddly, with activations in a file: the bits of plain training."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rotor_profiling.step import measured_peak
from rotor_py import Checkpointable
from tests.checkpointable.steps import between
from tests.execute.test_moving import same, settle
from tests.training.test_offload import tier_of

WIDTH, ROWS = 64, 256
SHARE = 0.3
"""Of what storing everything takes above the least, the part that the limit leaves."""


class Twice(torch.autograd.Function):
    """The square, which saves its input two times, nothing of it a third time, and a tensor of no bytes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x, x[:0], torch.empty(0))
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        one, other, *_ = ctx.saved_tensors
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
    return nn.Sequential(*(make() for _ in range(4)))


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def loss_of(output: Any) -> torch.Tensor:
    return (output[0] if isinstance(output, tuple) else output).square().mean()  # type: ignore[no-any-return]  # a tensor


def gradients(model: nn.Module, backward: Callable[[torch.Tensor], object] = torch.Tensor.backward) -> list[Any]:
    torch.manual_seed(5)
    loss = loss_of(model(batch()))
    try:
        backward(loss)
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    finally:
        model.zero_grad()


Plan = Callable[[nn.Module], Checkpointable]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plans a model for a disk so fast that moving always pays; something does move."""
    monkeypatch.setattr("rotor_py.offload.open_tier.measure_bandwidth", lambda *_: 1e13)

    def plan(model: nn.Module) -> Checkpointable:
        options: dict[str, Any] = {"fresh_grads": True, "watch": False, "cache": False, "offload": f"file:{tmp_path}"}
        found = Checkpointable(model, batch(), 10**9, loss=loss_of, **options)
        found.compute_sequence(between(found, SHARE))
        assert found.sequence.moves is not None
        return found

    return plan


@pytest.mark.parametrize("kind", STAGES)
def test_stages_that_save_oddly_are_exact_and_inside_the_limit(kind: str, planned: Plan) -> None:
    model, expected = planned(chain(STAGES[kind])), gradients(chain(STAGES[kind]))
    for _ in range(2):
        assert same(gradients(model), expected)
    value = batch()
    peak = measured_peak(lambda: loss_of(model(value)).backward(), [*model.parameters(), value], torch.device("cpu"))
    assert peak <= model.report().peak_bytes <= int(model.mem_limit)  # type: ignore[arg-type] # it is in bytes
    assert tier_of(model).held_bytes == 0


def twice(loss: torch.Tensor, retain: bool = True) -> None:
    loss.backward(retain_graph=retain)
    loss.backward()


def in_a_thread(loss: torch.Tensor) -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(loss.backward).result()


def test_odd_backwards_and_hooks_of_the_user_are_exact_and_errors_cost_that_step_only(planned: Plan) -> None:
    model, expected = planned(chain()), gradients(chain())
    for backward in (twice, in_a_thread):
        assert same(gradients(model, backward), gradients(chain(), backward))
        assert tier_of(model).held_bytes == 0
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(model), expected)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(model, partial(twice, retain=False))
    assert same(gradients(model), expected)
    assert tier_of(model).held_bytes == 0

    for stage in (0, 2, 3):
        hook = model.model[stage].up.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gradients(model)
        hook.remove()
        # Until the next backward, PyTorch holds the graph of the one that failed; it does so without a plan as well.
        assert same(gradients(model), expected)
        gc.collect()
        settle(tier_of(model))
    for _ in range(3):
        model(batch())  # without a backward
    settle(tier_of(model))
    assert same(gradients(model), expected)

    plain, before = chain(), tier_of(model).moved_bytes  # without gradients, nothing moves
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(1)
            expected = plain(batch())
            torch.manual_seed(1)
            assert torch.equal(model(batch()), expected)
    assert tier_of(model).moved_bytes == before
    model.eval()
    assert same(gradients(model), gradients(plain.eval()))


def test_two_models_share_a_folder_and_no_bytes(planned: Plan, tmp_path: Path) -> None:
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
