"""The same training steps twice, with and without a sequence, and everything that is left compared bit for bit."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_py import CheckpointOptim
from rotor_py.measure.cut import Cut, cut
from rotor_solver import Sequence
from tests.checkpointable.steps import CPU

Forward = Callable[[Any], Any]


def cut_of(model: nn.Module, sample: Any) -> Cut:
    return cut(model, sample, CPU)


def replayed(found: Cut, sequence: Sequence) -> Forward:
    def forward(value: Any) -> Any:
        for _, layer in found.prefix:
            value = layer(value)
        names, functions = zip(*found.stages, strict=True)
        return CheckpointOptim.apply(functions, sequence, names, True, value)

    return forward


def steps(model: nn.Module, forward: Forward, sample: Any, autocast: Any = None) -> list[tuple[str, torch.Tensor]]:
    """Train three steps; return copies of all that a step leaves behind, after each: the random state included."""
    torch.manual_seed(5)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    found: list[tuple[str, torch.Tensor]] = []
    for step in range(3):
        value = copy.deepcopy(sample)
        optimizer.zero_grad()
        with autocast or nullcontext():
            output = forward(value)
            loss = sum(t.float().square().mean() * (i + 1) for i, t in enumerate(tensors_in(output)) if t.requires_grad)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        state = [(f"output {i}", t.detach()) for i, t in enumerate(tensors_in(output))]
        state += [(f"gradient of input {i}", t.grad) for i, t in enumerate(tensors_in(value)) if t.grad is not None]
        state += [(f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]
        optimizer.step()
        state += [*model.named_parameters(), *model.named_buffers(), ("random state", torch.get_rng_state())]
        found += [(f"{name} after step {step}", tensor.detach().clone()) for name, tensor in state]
    return found


def assert_same(found: list[tuple[str, torch.Tensor]], expected: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    wrong = [
        name
        for (name, a), (_, b) in zip(found, expected, strict=True)
        if not (a.dtype == b.dtype and torch.equal(a, b) and a.stride() == b.stride())
    ]
    assert not wrong, f"differs from plain training: {wrong[:5]}"
