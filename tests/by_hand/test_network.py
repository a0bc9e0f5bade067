"""`Checkpoint` and `CheckpointedNetwork`: only the inputs of segments are kept, and training is plain training."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpoint, CheckpointedNetwork
from tests.by_hand.networks import WIDTH, Block, batch
from tests.execute.training import CPU, assert_same, steps
from tests.fields import Noted, raises


def segments(count: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(WIDTH), Block(WIDTH)) for _ in range(count)]


def test_training_it_is_plain_training() -> None:
    plain = nn.Sequential(*segments())
    network = CheckpointedNetwork(copy.deepcopy(list(plain)))
    found = [(name.replace("segments.", ""), tensor) for name, tensor in steps(network, network, batch())]
    assert_same(found, steps(plain, plain, batch()))


def test_every_segment_is_run_twice_and_again_for_a_retained_graph() -> None:
    runs, network = Noted(), CheckpointedNetwork([nn.Linear(4, 4) for _ in range(3)])
    for segment in network.segments:
        segment.register_forward_pre_hook(lambda segment, _: runs.append(segment))
    total = network(torch.ones(2, 4)).sum()
    total.backward(retain_graph=True)
    assert [list(network.segments).index(each) for each in runs] == [0, 1, 2, 2, 1, 0]
    first = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    total.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(network.parameters(), first, strict=True))
    with pytest.raises(RuntimeError, match=r"already used by a backward|second time"):
        total.backward()


def test_the_memory_that_is_told_is_the_memory_that_is_kept() -> None:
    network, value = CheckpointedNetwork(segments()), batch(1024)
    assert (network.memory_bytes, network.full_memory_bytes, network.memory_savings) == (0, 0, 0.0)
    activation = value.nbytes
    kept: list[torch.Tensor] = []
    during = measured_peak(lambda: kept.append(network(value)), [], CPU)
    # while the last segment runs: three inputs beside the batch, and what a block has at a time
    assert network.memory_bytes == 4 * activation
    assert during < 3 * activation + 6 * activation
    # of every block: four layers, a dropout, and its own output; and the batch
    assert network.full_memory_bytes == (1 + 8 * 6) * activation
    assert network.memory_savings == 1 - 4 / 49
    plain = nn.Sequential(*segments())
    peaks = [measured_peak(lambda net=net: net(value).square().sum().backward(), [], CPU) for net in (plain, network)]
    assert peaks[1] < 0.5 * peaks[0]
    parts = [nn.Linear(6, 6), nn.Flatten(), nn.Identity(), nn.Linear(6, 6), lambda x: x.sin()]
    network = CheckpointedNetwork(parts)  # views and identities are no memory of their own
    network(torch.ones(10, 6))
    assert (network.memory_bytes, network.full_memory_bytes) == (3 * 240, 4 * 240)
    nothing = CheckpointedNetwork([nn.Linear(3, 3)])
    nothing(torch.ones(0, 3))
    assert nothing.memory_savings == 0.0


def test_evaluation_and_no_grad_are_the_segments_which_may_be_functions_without_parameters_of_others() -> None:
    parts = segments()
    network, value = CheckpointedNetwork(parts).eval(), batch()
    assert torch.equal(network(value), nn.Sequential(*parts)(value))
    assert network(value).grad_fn.name() == nn.Sequential(*parts)(value).grad_fn.name()
    network.train()
    with torch.no_grad():
        assert not network(value).requires_grad
    value = torch.randn(5, 5, requires_grad=True)
    CheckpointedNetwork([torch.sin, lambda x: x * 2])(value).sum().backward()
    assert torch.equal(value.grad, 2 * value.detach().cos())
    weight = torch.ones(5, requires_grad=True)
    with raises(RuntimeError, "foreign_parameter", name="segment 0"):
        CheckpointedNetwork([lambda x: x * weight])(value).sum().backward()
    bad: Any
    for bad, kind in (([], "no_segments"), ([nn.ReLU(), 3], "not_a_segment")):
        with raises(ValueError, kind):
            CheckpointedNetwork(bad)
    with raises(ValueError, "not_a_segment", name="segment"):
        Checkpoint(3, torch.ones(1))


def test_a_checkpoint_computes_its_segment_again_as_it_ran() -> None:
    torch.manual_seed(2)
    segment = segments(1)[0]
    segment.append(nn.LazyBatchNorm1d(momentum=None))
    value = batch().requires_grad_()
    segment(value)
    checkpoint = Checkpoint(segment, value)
    expected = segment(value)
    gradients = torch.autograd.grad(expected.square().sum(), [value, *segment.parameters()])
    state, buffers = torch.get_rng_state(), [b.clone() for b in segment.buffers()]
    output = checkpoint.recompute()
    assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, buffers, segment.buffers()))
    output.square().sum().backward()
    assert all(map(torch.equal, gradients, [checkpoint.input.grad, *(p.grad for p in segment.parameters())]))
    assert value.grad is None
    with torch.no_grad():
        assert torch.equal(checkpoint.recompute(), expected)
    assert checkpoint.memory_bytes == value.nbytes
    checkpoint = Checkpoint(nn.ReLU(inplace=True), torch.randn(4))
    with raises(RuntimeError, "kept_overwritten"):
        checkpoint.recompute()
