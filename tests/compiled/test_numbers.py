"""A planned compiled step has the numbers of the compiled step that stores everything, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, verify
from rotor_solver import Sequence, recompute_all, store_all
from tests.compiled.network import WIDTH, batch, gradients, loss, network, results, run_compiled, same, stage_by_stage

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiled() -> Checkpointable:
    return network()


def sequences(found: Checkpointable) -> tuple[Sequence, Sequence]:
    assert found.chain is not None
    return store_all(found.chain), recompute_all(found.chain)


def test_recomputation_changes_no_bit(compiled: Checkpointable) -> None:
    stored, again = sequences(compiled)
    expected = results(compiled, stored, batch())
    assert same(results(compiled, again, batch()), expected)
    moved = [each for name, each in compiled.model.named_buffers() if "running_mean" in name]
    assert moved
    assert all(not each.any() for each in moved)  # put back; in a step, they move, and once
    counts = [each for each in expected if each.dtype == torch.int64]
    assert all(each == 1 for each in counts)


def test_numbers_are_those_of_eager_mode_but_for_rounding() -> None:
    """With the random numbers of eager mode: generated kernels draw others."""
    found = network({"fallback_random": True}, blocks=2)
    _, again = sequences(found)
    made = results(found, again, batch())
    found.model.zero_grad()
    torch.manual_seed(2)
    output = found.model(batch())
    loss(output).backward()
    for a, b in zip(made, [output, *gradients(found.model), *found.model.buffers()], strict=True):
        torch.testing.assert_close(a, b)


def test_a_retained_graph_goes_backward_twice(compiled: Checkpointable) -> None:
    stored, again = sequences(compiled)
    expected = results(compiled, stored, batch(), passes=2)
    assert same(results(compiled, again, batch(), passes=2), expected)


def test_two_forwards_in_flight(compiled: Checkpointable) -> None:
    def both(sequence: Sequence) -> list[torch.Tensor]:
        compiled.model.zero_grad()
        compiled.sequence = sequence
        torch.manual_seed(3)
        first, second = compiled(batch()), compiled(batch().neg())
        (loss(first) + 2 * loss(second)).backward()
        return gradients(compiled.model)

    stored, again = sequences(compiled)
    expected = both(stored)
    assert same(both(again), expected)


@pytest.mark.slow
def test_another_shape_is_compiled_when_it_comes(compiled: Checkpointable) -> None:
    stored, again = sequences(compiled)
    made = results(compiled, again, batch(48))  # inside of nodes of autograd, where gradients are off
    assert same(made, results(compiled, stored, batch(48)))


def test_the_peak_is_the_predicted_one(compiled: Checkpointable) -> None:
    model, value = compiled.model, batch()
    compiled.watch = False

    def step() -> None:
        output = compiled(value)
        loss(output).backward()

    for sequence in sequences(compiled):
        assert compiled.budget is not None
        compiled.sequence = sequence
        model.zero_grad()
        step()
        model.zero_grad()
        peak = measured_peak(step, [*model.parameters(), *model.buffers(), value], CPU)
        predicted = compiled.budget.peak_bytes(sequence)
        assert 0.98 * predicted <= peak <= predicted


def test_verifying_compares_with_the_compiled_step_and_tells_the_distance_to_eager(compiled: Checkpointable) -> None:
    _, again = sequences(compiled)
    compiled.sequence = again
    (found,) = verify(compiled, batch(), loss=loss, fresh_grads=True)
    assert found.max_grad_difference == 0
    assert found.noise == 0
    assert found.eager_difference is not None
    assert found.eager_difference > 0  # dropout draws other numbers in generated kernels
    assert compiled.sequence is again


@pytest.mark.slow
def test_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = network(blocks=2)
        stored, again = sequences(found)
        expected = results(found, stored, batch())
        assert same(results(found, again, batch()), expected)


class Alternating(nn.Module):
    """Equal blocks, which read one and the other of two inputs in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, value: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            value = torch.tanh(block(value)) * (one if number % 2 else other)
        return value


def test_equal_blocks_read_what_is_theirs() -> None:
    torch.manual_seed(0)
    model = Alternating()
    values = (batch(), batch().sin(), batch().cos())
    with stage_by_stage():
        found = Checkpointable(model, values, "1GB", compile=True, loss=loss, fresh_grads=True, granularity=4)
    run_compiled(found)
    _, again = sequences(found)
    found.sequence = again
    output = found(*values)
    loss(output).backward()
    made = [output.detach(), *gradients(model)]
    model.zero_grad()
    output = model(*values)
    loss(output).backward()
    torch.testing.assert_close(made, [output.detach(), *gradients(model)])
