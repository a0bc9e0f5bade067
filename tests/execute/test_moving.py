"""A step whose stages move what they save: the same bits, and no more memory than the moves promise."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling.step import measured_peak
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.offload.file_tier import FileTier
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence
from rotor_solver.offload import Moves
from tests.fields import raises

CPU = torch.device("cpu")
WIDTH, BATCH, LAYERS = 128, 256, 4
ONE = 4 * BATCH * 4 * WIDTH
"""Bytes of each of the two activations inside a block, which leave."""


class Block(nn.Module):
    """Saves two activations inside: the input of GELU, and that of the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(nn.functional.dropout(nn.functional.gelu(self.up(value)), 0.1))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    found = FileTier(tmp_path)
    yield found
    found.close()


def blocks(kind: Callable[[], Any] = Block) -> list[Any]:
    torch.manual_seed(0)
    return [kind() for _ in range(LAYERS)]


def moves_of(length: int, wait_out: dict[int, list[int]], fetch: dict[int, list[int]]) -> Moves:
    return Moves(*(tuple(tuple(found.get(at, ())) for at in range(length)) for found in (wait_out, fetch)))


ALL = Sequence.parse("Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0")
ONE_AT_A_TIME = moves_of(9, {1: [0], 2: [1], 3: [2]}, {6: [2], 7: [1], 8: [0]})
"""Each waits to be out before the next stage begins, and is fetched at its own backward."""
EARLY = moves_of(9, {4: [0, 1], 5: [2]}, {5: [2], 6: [1, 0]})
MIXED = Sequence.parse("Fe_0, CF_1, Fn_2, Fe_3, L, B_3, CF_1, Fe_2, B_2, Fe_1, B_1, B_0")


def moving(layers: list[Any], sequence: Sequence, moves: Moves, tier: FileTier | None) -> Callable[..., torch.Tensor]:
    def forward(value: torch.Tensor) -> torch.Tensor:
        runners = [StageRunner(layer, f"block {number}") for number, layer in enumerate(layers)]
        instructions = read_sequence(len(layers), Sequence(sequence.operations, moves=moves))
        return Tape(runners, instructions, tier=tier).forward(value)  # type: ignore[no-any-return]  # a tensor

    return forward


def batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients_of(layers: list[Any], run: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    value = batch()
    output = run(value)
    output.square().mean().backward()
    found = [output.detach(), value.grad, *(p.grad for layer in layers for p in layer.parameters())]
    for layer in layers:
        layer.zero_grad()
    return [*found, torch.get_rng_state()]


def same(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("sequence", "moves", "moved"),
    [
        (ALL, ONE_AT_A_TIME, 3),
        (ALL, EARLY, 3),
        (MIXED, moves_of(12, {1: [0], 5: [3]}, {5: [3], 10: [0]}), 2),
        (ALL, Moves.none(9), 0),
    ],
)
def test_gradients_are_those_of_plain_training_bit_for_bit(sequence: Sequence, moves: Moves, moved: int, tier) -> None:
    layers = blocks()
    expected = gradients_of(layers, nn.Sequential(*layers))
    for _ in range(2):
        before = tier.moved_bytes
        assert same(gradients_of(layers, moving(layers, sequence, moves, tier)), expected)
        assert tier.moved_bytes - before >= moved * 2 * ONE  # the dropout's mask too
        assert bool(tier.moved_bytes - before) == bool(moved)
    assert tier.held_bytes == 0


def test_what_is_away_takes_no_memory_and_second_derivatives_are_those_of_plain_training(tier: FileTier) -> None:
    layers, value = blocks(), batch()
    plain = nn.Sequential(*layers)
    one, early = (moving(layers, ALL, moves, tier) for moves in (ONE_AT_A_TIME, EARLY))
    stored, late, least = (
        measured_peak(lambda: run(value).sum().backward(), [value], CPU)  # noqa: B023  # called at once
        for run in (plain, early, one)
    )
    # Three blocks are away when the fourth one is there. If they are waited for late, all are there at the loss.
    assert stored - least >= 3 * 2 * ONE
    assert stored > late > least

    def second(run: Any) -> torch.Tensor:
        torch.manual_seed(3)
        (first,) = torch.autograd.grad(run(value).square().sum(), [value], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [layers[0].up.weight])[0]

    assert torch.equal(second(one), second(plain))


class Curious(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen = self.up(value)
        return value + self.down(nn.functional.gelu(self.seen))


def test_what_somebody_else_holds_stays(tier: FileTier) -> None:
    layers = blocks(Curious)
    expected = gradients_of(layers, nn.Sequential(*layers))
    assert same(gradients_of(layers, moving(layers, ALL, ONE_AT_A_TIME, tier)), expected)
    assert tier.moved_bytes == 3 * ONE  # of two activations in a block, one is on the module as well


TWO = Sequence.parse("Fe_0, Fe_1, L, B_1, B_0"), moves_of(5, {1: [0]}, {4: [0]})


def test_what_is_overwritten_after_it_was_saved_is_refused_as_in_plain_training(tier: FileTier) -> None:
    layers = [lambda value: value.exp().add_(1).sin(), nn.Tanh()]
    for run in (lambda value: layers[1](layers[0](value)), moving(layers, *TWO, tier)):
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            run(batch()).sum().backward()


def settle(tier: FileTier) -> None:
    """Nothing stays in the tier, once the copies that an error has left under way are over."""
    for _ in range(10_000):
        if not tier.held_bytes:
            return
        time.sleep(0.001)
    raise AssertionError(f"{tier.held_bytes} bytes are left in the tier")


def test_a_sequence_that_moves_needs_a_tier() -> None:
    with raises(ValueError, "no_tier", name="offload"):
        moving(blocks(), ALL, EARLY, None)(batch())
