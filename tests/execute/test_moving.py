"""Steps whose stages move what they save, also oddly: the same bits, and no more memory than the moves promise."""

import gc
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.offload.file_tier import FileTier
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence
from rotor_solver.offload import Moves
from tests.checkpointable.steps import CPU, Residual, planned_at, square, step_peak
from tests.fields import raises
from tests.offload.tiers import held
from tests.training.test_concurrent import in_threads

WIDTH, BATCH = 128, 256
ONE = 4 * BATCH * 4 * WIDTH
"""Bytes of each of the two activations inside a block, which leave."""


Backward = Callable[[torch.Tensor], object]


class Block(Residual):
    """Saves two activations inside: the input of GELU, and that of the second layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


def chain(make: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(4)))


def moves_of(length: int, wait_out: dict[int, list[int]], fetch: dict[int, list[int]]) -> Moves:
    return Moves(*(tuple(tuple(found.get(at, ())) for at in range(length)) for found in (wait_out, fetch)))


ALL = Sequence.parse("Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0")
ONE_AT_A_TIME = moves_of(9, {1: [0], 2: [1], 3: [2]}, {6: [2], 7: [1], 8: [0]})
"""Each waits to be out before the next stage begins, and is fetched at its own backward."""
EARLY = moves_of(9, {4: [0, 1], 5: [2]}, {5: [2], 6: [1, 0]})
MIXED = Sequence.parse("Fe_0, CF_1, Fn_2, Fe_3, L, B_3, CF_1, Fe_2, B_2, Fe_1, B_1, B_0")


def moving(layers: Any, sequence: Sequence, moves: Moves, tier: FileTier | None) -> Callable[..., torch.Tensor]:
    def forward(value: torch.Tensor) -> torch.Tensor:
        runners = [StageRunner(layer, f"block {number}") for number, layer in enumerate(layers)]
        instructions = read_sequence(len(layers), Sequence(sequence.operations, moves=moves))
        return Tape(runners, instructions, tier=tier).forward(value)  # type: ignore[no-any-return]  # a tensor

    return forward


def batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(model: nn.Module, backward: Backward = torch.Tensor.backward, run: Any = None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    value = batch()
    output = (run or model)(value)
    try:
        backward(square(output))
        outputs = [each.detach() for each in tensors_in(output)]
        return [*outputs, value.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]
    finally:
        model.zero_grad()


def same(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("sequence", "moves", "moved"),
    [
        (ALL, ONE_AT_A_TIME, 3),
        (ALL, EARLY, 3),
        (MIXED, moves_of(12, {1: [0], 5: [3]}, {5: [3], 10: [0]}), 2),
        (ALL, Moves(((),) * 9, ((),) * 9), 0),
    ],
)
def test_gradients_are_those_of_plain_training_bit_for_bit(sequence: Sequence, moves: Moves, moved: int, tier) -> None:
    layers = chain()
    expected = gradients(layers)
    for _ in range(2):
        before = tier.moved_bytes
        assert same(gradients(layers, run=moving(layers, sequence, moves, tier)), expected)
        assert tier.moved_bytes - before >= moved * 2 * ONE  # the dropout's mask too
        assert bool(tier.moved_bytes - before) == bool(moved)
    assert held(tier) == 0


def test_what_is_away_takes_no_memory_and_second_derivatives_are_those_of_plain_training(tier: FileTier) -> None:
    layers, value = chain(), batch()
    one, early = (moving(layers, ALL, moves, tier) for moves in (ONE_AT_A_TIME, EARLY))
    stored, late, least = (
        measured_peak(lambda: run(value).sum().backward(), [value], CPU)  # noqa: B023  # called at once
        for run in (layers, early, one)
    )
    # Three blocks are away when the fourth one is there. If they are waited for late, all are there at the loss.
    assert stored - least >= 3 * 2 * ONE
    assert stored > late > least

    def second(run: Any) -> torch.Tensor:
        torch.manual_seed(3)
        (first,) = torch.autograd.grad(run(value).square().sum(), [value], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [layers[0][0].weight])[0]

    assert torch.equal(second(one), second(layers))


class Curious(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen = self[0](value)
        return value + self[3](nn.functional.gelu(self.seen))


def test_what_somebody_else_holds_stays(tier: FileTier) -> None:
    layers = chain(Curious)
    expected = gradients(layers)
    assert same(gradients(layers, run=moving(layers, ALL, ONE_AT_A_TIME, tier)), expected)
    assert tier.moved_bytes == 3 * ONE  # of two activations in a block, one is on the module as well


def test_what_is_overwritten_after_it_was_saved_is_refused_as_in_plain_training(tier: FileTier) -> None:
    layers = [lambda value: value.exp().add_(1).sin(), nn.Tanh()]
    both, moves = Sequence.parse("Fe_0, Fe_1, L, B_1, B_0"), moves_of(5, {1: [0]}, {4: [0]})
    for run in (lambda value: layers[1](layers[0](value)), moving(layers, both, moves, tier)):
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            run(batch()).sum().backward()


def settle(tier: FileTier) -> None:
    """Nothing stays in the tier, once the copies that an error has left under way are over."""
    for _ in range(10_000):
        if not held(tier):
            return
        time.sleep(0.001)
    raise AssertionError(f"{held(tier)} bytes are left in the tier")


def tier_of(model: Checkpointable) -> Any:
    """Where what moves waits, which counts its bytes; no user sees it."""
    return model._planner.model.tier


def test_a_sequence_that_moves_needs_a_tier() -> None:
    with raises(ValueError, "no_tier", name="offload"):
        moving(chain(), ALL, EARLY, None)(batch())


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


def dropping() -> nn.Module:
    return Stage(lambda x: nn.functional.dropout(x.tanh().exp(), 0.3))


STAGES: dict[str, Callable[[], nn.Module]] = {
    "saved twice": lambda: Stage(lambda x: Twice.apply(x.tanh())),
    "views of one storage": lambda: Stage(views),
    "checkpointed inside": lambda: Stage(lambda x: checkpoint(lambda y: y.tanh().exp(), x, use_reentrant=False).sin()),
    "handed on": lambda: Handing(torch.tanh),
    "output is a view": lambda: ViewOfSaved(lambda x: x.tanh().exp()),
}


Plan = Callable[[nn.Module], Checkpointable]


@pytest.fixture
def planned(tmp_path: Path, fast_link: None) -> Plan:
    """Plans a model of which something moves."""

    def plan(model: nn.Module) -> Checkpointable:
        options: dict[str, Any] = {"fresh_grads": True, "watch": False, "cache": False, "offload": f"file:{tmp_path}"}
        found = planned_at(SHARE, model, batch(), mem_limit=10**9, **options)
        assert found.sequence.moves is not None
        return found

    return plan


@pytest.mark.parametrize("kind", STAGES)
def test_stages_that_save_oddly_are_exact_and_inside_the_limit(kind: str, planned: Plan) -> None:
    model, expected = planned(chain(STAGES[kind])), gradients(chain(STAGES[kind]))
    for _ in range(2):
        assert same(gradients(model), expected)
    peak = step_peak(model, batch())
    assert peak <= model.report().peak_bytes <= int(model.mem_limit)  # type: ignore[arg-type] # it is in bytes
    assert held(tier_of(model)) == 0


def twice(loss: torch.Tensor, retain: bool = True) -> None:
    loss.backward(retain_graph=retain)
    loss.backward()


def test_odd_backwards_and_hooks_of_the_user_are_exact_and_errors_cost_that_step_only(planned: Plan) -> None:
    model, expected = planned(chain(dropping)), gradients(chain(dropping))
    for backward in (twice, lambda loss: in_threads(loss.backward)):
        assert same(gradients(model, backward), gradients(chain(dropping), backward))
        assert held(tier_of(model)) == 0
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(model), expected)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(model, partial(twice, retain=False))
    assert same(gradients(model), expected)
    assert held(tier_of(model)) == 0

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

    plain, before = chain(dropping), tier_of(model).moved_bytes  # without gradients, nothing moves
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(1)
            expected = plain(batch())
            torch.manual_seed(1)
            assert torch.equal(model(batch()), expected)
    assert tier_of(model).moved_bytes == before
    model.eval()
    assert same(gradients(model), gradients(plain.eval()))
