"""Small networks with parts of every level, and training steps of them, compared with plain training."""

import copy
from typing import Any

import torch
from torch import nn

from rotor_py import Checkpointable
from tests.checkpointable.steps import Residual, square, step_peak
from tests.execute.training import assert_same, steps

WIDTH = 32


class Block(Residual):
    """A residual block that draws random numbers and keeps statistics."""

    def __init__(self, width: int) -> None:
        inside = nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, width)
        super().__init__(nn.Sequential(*inside), nn.Dropout(0.2))


def staged(width: int = 48, groups: int = 2, blocks: int = 2) -> nn.Sequential:
    """A stem, groups of blocks, and a head: parts of the levels 1, 2 and 4."""
    torch.manual_seed(0)
    body = [nn.Sequential(*(Block(width) for _ in range(blocks))) for _ in range(groups)]
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), *body, nn.Linear(width, 3))


def rows(count: int = 256) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1))


def batch(count: int = 64) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def checkpointed(network: nn.Module, batch: Any, **options: Any) -> Checkpointable:
    return Checkpointable(network, batch, loss=square, fresh_grads=True, **options)


def assert_plain_training(planned: Checkpointable, batch: Any) -> None:
    plain = copy.deepcopy(planned.model)
    assert_same(steps(planned, planned, batch), steps(plain, plain, batch))


def assert_peak_as_predicted(planned: Checkpointable, batch: Any) -> int:
    """The measured peak of a step, which is at most 2 % below the predicted one, and not above."""
    # The state of an optimizer that has trained the model counts, but is not there in this step.
    predicted = planned.budget.peak_bytes(planned.sequence) - planned.budget.fixed.optimizer
    measured = step_peak(planned, batch, fresh_grads=True)
    assert 0.98 * predicted <= measured <= predicted
    return measured
