"""A planned compiled step has the numbers of the compiled step that stores everything, bit for bit."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch

from rotor_py import Checkpointable, verify
from rotor_solver import Sequence, recompute_all, store_all
from tests.checkpointable.steps import Tower
from tests.checkpointable.steps import square as loss
from tests.compile.network import ROWS, WIDTH, batch, gradients, measured, network, peak, results, same, share_of, whole

Pair = tuple[tuple[Checkpointable, Sequence], tuple[Checkpointable, Sequence]]
"""A model and its sequence, which recomputes, and the same that stores everything."""


def stages(found: Checkpointable) -> Pair:
    return (found, recompute_all(found.chain)), (found, store_all(found.chain))


@cache
def whole_graphs(_: Checkpointable) -> Pair:
    free = whole("1GB")
    tight = whole(share_of(free, 0.9))
    assert peak(tight) < peak(free)
    return (tight, tight.sequence), (free, free.sequence)


def planned_batch(found: Checkpointable) -> torch.Tensor:
    return batch(ROWS if len(found.names) == 1 else 64)


@pytest.fixture(params=[stages, pytest.param(whole_graphs, marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest, compiled: Checkpointable) -> Pair:
    made: Callable[[Checkpointable], Pair] = request.param
    return made(compiled)


def test_recomputation_changes_no_bit_nor_does_it_in_a_second_backward(pair: Pair) -> None:
    (found, again), (free, stored) = pair
    expected = results(free, stored, planned_batch(found))
    assert same(results(found, again, planned_batch(found)), expected)
    counts = [each for each in expected if each.dtype == torch.int64]
    assert counts
    assert all(each == 1 for each in counts)  # of batch norms
    twice = [results(*planned, planned_batch(found), passes=2) for planned in pair]
    assert same(*twice)


def test_two_forwards_in_flight(pair: Pair) -> None:
    def both(found: Checkpointable, sequence: Sequence) -> list[torch.Tensor]:
        before = copy.deepcopy(found.model.state_dict())
        found.model.zero_grad()
        found.sequence = sequence
        torch.manual_seed(3)
        first, second = found(planned_batch(found)), found(planned_batch(found).neg())
        (loss(first) + 2 * loss(second)).backward()
        made = gradients(found.model)
        found.model.load_state_dict(before)
        return made

    planned, stored = pair
    assert same(both(*planned), both(*stored))


@pytest.mark.slow
def test_another_shape_is_compiled_when_it_comes(pair: Pair) -> None:
    planned, stored = pair
    made = results(*planned, batch(48))  # inside of nodes of autograd, where gradients are off
    assert same(made, results(*stored, batch(48)))


def test_the_peak_is_the_predicted_one(pair: Pair) -> None:
    for found, sequence in pair:
        found.sequence = sequence
        assert 0.98 * peak(found) <= measured(found, planned_batch(found)) <= peak(found)


def test_verifying_compares_with_the_compiled_step_and_tells_the_distance_to_eager(pair: Pair) -> None:
    (found, again), _ = pair
    found.sequence = again
    (verified,) = verify(found, planned_batch(found), loss=loss, fresh_grads=True)
    assert verified.max_grad_difference == 0
    assert verified.eager_difference > 0  # dropout draws other numbers in generated kernels
    assert verified.plain_peak_bytes > verified.measured_peak_bytes
    assert found.sequence is again


@pytest.mark.slow
def test_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        planned, stored = stages(network(blocks=2))
        assert same(results(*planned, batch()), results(*stored, batch()))


@pytest.mark.slow
def test_numbers_are_those_of_eager_mode_but_for_rounding() -> None:
    """With the random numbers of eager mode: generated kernels draw others."""
    found = network({"fallback_random": True}, blocks=2)
    made = results(found, recompute_all(found.chain), batch())
    found.model.zero_grad()
    torch.manual_seed(2)
    output = found.model(batch())
    loss(output).backward()
    for a, b in zip(made, [output, *gradients(found.model), *found.model.buffers()], strict=True):
        torch.testing.assert_close(a, b)


class Alternating(Tower):
    """Equal blocks, which read one and the other of two inputs in turn."""

    def forward(self, value: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.layers):
            value = torch.tanh(block(value)) * (one if number % 2 else other)
        return value


def test_equal_blocks_read_what_is_theirs() -> None:
    model = Alternating(WIDTH, 4)
    values = (batch(), batch().sin(), batch().cos())
    found = network(True, 4, model, values)
    found.sequence = recompute_all(found.chain)
    made = []
    for run in (found, model):
        model.zero_grad()
        output = run(*values)
        loss(output).backward()
        made.append([output.detach(), *gradients(model)])
    torch.testing.assert_close(*made)
