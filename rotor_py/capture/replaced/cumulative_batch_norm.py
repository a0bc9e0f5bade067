"""Batch norms that average over all batches (`momentum=None`), as one operator of a captured graph.

Such a layer reads from its buffer how many batches there were, as a number of Python. TorchDynamo would break the graph
there. As one operator, the layer counts and reads while it runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from rotor_py.capture.replaced.replacement import Replaced, Replacement


def batch_norm_over_all(
    value: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    batches: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """What a batch norm with `momentum=None` does in training: `batches`, and statistics over all, go on by one."""
    batches.add_(1)
    momentum = 0.0 if is_fake(batches) else 1.0 / float(batches)  # a fake tensor has no number
    return F.batch_norm(value, mean, variance, weight, bias, True, momentum, eps)


@cache  # so that TorchDynamo meets the same function at every step
def _forward() -> Any:
    original = _BatchNorm.forward
    operator = torch._dynamo.allow_in_graph(batch_norm_over_all)

    def forward(self: Any, input: torch.Tensor) -> Any:
        averages = self.training and self.momentum is None and self.num_batches_tracked is not None
        if not (averages and self.track_running_stats and torch.compiler.is_compiling()):
            return original(self, input)
        self._check_input_dim(input)
        buffers = self.running_mean, self.running_var, self.num_batches_tracked
        return operator(input, *buffers, self.weight, self.bias, self.eps)

    return forward


def _found() -> list[Replaced]:
    return [(_BatchNorm, "forward", _forward())]


def has_batch_norms(model: nn.Module) -> bool:
    """Whether any layer of `model` has the forward that is replaced."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


batch_norms_in_graphs = Replacement(_found).in_place
"""A context in which such layers do not break the graph of a model that is traced."""
