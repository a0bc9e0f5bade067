"""Which tensors a graph's cuts carry: counted at once, and by trying each."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.capture.graph import graph_facts


class Skipping(nn.Module):
    """Layers that read one or two earlier results each, however far back."""

    def __init__(self, seed: int, depth: int = 14) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.reads = [[max(0, at - chance.choice((0, 0, 1, 5))) for _ in range(2)] for at in range(depth)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for layer, (one, other) in zip(self.layers, self.reads, strict=True):
            made.append(layer(made[one]).tanh() + made[other])
        return made[-1]


@pytest.mark.parametrize("seed", range(4))
def test_what_carrying_one_more_tensor_gains_is_what_trying_it_shows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gained = graph_facts._Crossings.gained
    counted = []

    def compared(crossings: graph_facts._Crossings, carried: list[torch.fx.Node]) -> dict[torch.fx.Node, int]:
        found, now = gained(crossings, carried), len(crossings.possible(carried))
        for node in {node for live in crossings._live.values() for node in live} - {*carried}:
            assert found[node] == len(crossings.possible([*carried, node])) - now
            counted.append(found[node])
        return found

    monkeypatch.setattr(graph_facts._Crossings, "gained", compared)
    Checkpointable(Skipping(seed), loss=torch.sum, cache=False).measure(torch.randn(2, 8))
    assert max(counted) > 0
