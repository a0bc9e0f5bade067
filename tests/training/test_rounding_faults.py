"""A step with rounded checkpoints that is broken off anywhere: nothing stays behind, and the next step is right."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from rotor_profiling import memory_meter
from rotor_py import Checkpointable
from rotor_solver import Sequence
from tests.training.interrupt import Interrupt

BATCH = torch.randn(64, 64)


class Layer(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(value).tanh(), 0.1)


def step(network: nn.Module) -> list[torch.Tensor]:
    network.zero_grad()
    torch.manual_seed(0)
    network(BATCH).square().mean().backward()
    return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("word", ["bf16", "int8"])
def test_ctrl_c_at_any_operator_leaves_no_byte_and_the_next_step_is_right(word: str) -> None:
    layers = nn.Sequential(*(Layer(64, 64) for _ in range(4)))
    network = Checkpointable(layers, BATCH, loss=lambda output: output.square().mean(), keep=word, cache=False)
    network.sequence = Sequence.parse("CF_0, CF_1~, CF_2~, Fe_3, L, B_3, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0")
    expected = step(network)
    with Interrupt(0) as count:
        step(network)
    network.zero_grad()
    gc.collect()
    with memory_meter(torch.device("cpu")) as meter:
        for at in range(1, count.calls):
            with pytest.raises(KeyboardInterrupt), Interrupt(at):
                step(network)
        network.zero_grad()
        gc.collect()  # where the engine calls Python, plain training leaves cycles as well
    assert meter.phases[""].peak > 0
    assert meter.phases[""].end == 0
    assert all(map(torch.equal, step(network), expected))
