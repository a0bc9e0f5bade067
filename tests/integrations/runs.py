"""Runs of a trainer with a plan and without one, compared."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from tests.checkpointable.steps import between, blocks

BATCHES = list(torch.randn(4, 4, 3, 24, 24, generator=torch.Generator().manual_seed(1)))
"""An epoch. They are there already, so that the memory of a run is that of its steps."""


def entropy(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, torch.arange(len(output)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return blocks(2, 12)


def halfway(measured: Checkpointable) -> int:
    """A limit that bites: between the least possible and storing everything, the optimizer's state counted."""
    assert measured.budget.fixed.optimizer > 0
    return between(measured, 0.5)


def run_peak(run: Callable[[], Any], model: nn.Module, *present: torch.Tensor) -> int:
    """The measured peak of a whole run, from its first batch to its last; `present` is there before."""
    model.zero_grad(set_to_none=True)
    return measured_peak(run, [*model.parameters(), *model.buffers(), *present], torch.device("cpu"))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    """The same names, without a prefix, and the same bits."""
    kept, wanted = weights(found), weights(expected)
    assert list(kept) == list(wanted)
    wrong = [name for name in wanted if not torch.equal(kept[name], wanted[name])]
    assert not wrong, f"differs from plain training: {wrong[:5]}"
