"""Steps in which a device runs out of memory, compared with plain training in every bit that they leave."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rotor_py import Checkpointable
from tests.checkpointable.steps import planned_at, square
from tests.execute.starved import AtOperators
from tests.training.loop import differences, rows
from tests.training.tripping import left_behind

F = nn.functional
Train = Callable[[nn.Module], Any]


class Gated(nn.Module):
    """Captured, with stages that are stored in part, dropout and a batch norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.entry, self.norm = nn.Linear(12, width), nn.BatchNorm1d(width)
        self.gates = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.outs = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.norm(self.entry(value))
        for gate, out in zip(self.gates, self.outs, strict=True):
            value = value + F.dropout(out(F.silu(gate(value)) * torch.tanh(gate(value))), 0.2, self.training)
        return value


class Moving(nn.Module):
    """Its output depends on a buffer that it changes, and of which it has a new one now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.replaced = nn.Linear(32, 32), nn.Buffer(torch.zeros(32)), nn.Buffer(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.layer(value)
        self.seen.add_(value.detach().mean(0))
        self.replaced = self.replaced * 2
        return torch.tanh(value + self.seen) * self.replaced.log()


def moving() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 32), Moving(), nn.Dropout(0.2), Moving(), nn.GELU(), Moving())


def planned(model: nn.Module, share: float = 1.0, **given: Any) -> Checkpointable:
    return planned_at(share, copy.deepcopy(model), rows(), on_oom="replan", **given)


def step(network: nn.Module, seed: int = 3, batch: torch.Tensor | None = None) -> None:
    torch.manual_seed(seed)
    square(network(rows() if batch is None else batch)).backward()


def state(network: nn.Module) -> dict[str, Any]:
    gradients = {f"gradient of {name}": copy.deepcopy(p.grad) for name, p in network.named_parameters()}
    return {**gradients, **left_behind(network)}


def assert_exact_wherever_it_runs_out(network, start, train: Train = step, points=5, times=1, sequence=None) -> None:
    """Out of memory at `points` operators all over a step, `times` in a row: everything is as in plain training."""
    limit = network.mem_limit

    def begin() -> None:
        network.zero_grad()
        network.load_state_dict(start.state_dict())
        network.compute_sequence(limit)
        network.sequence = sequence or network.sequence

    begin()
    train(network)  # which buffers move is known from here on
    begin()
    plain = copy.deepcopy(start)
    train(plain)
    expected = state(plain)
    with AtOperators().inside_stages() as count:
        train(network)
    assert not differences(state(network), expected)
    assert count.calls > 30
    for at in range(1 + count.calls // (2 * points), count.calls + 1, count.calls // points):
        begin()
        with AtOperators(*range(at, at + 3 * times, 3)).inside_stages() as mode:
            train(network)
        assert mode.errors == times or at + 3 * times > count.calls
        assert not differences(state(network), expected), at


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)
