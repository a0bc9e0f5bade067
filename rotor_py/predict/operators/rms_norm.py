"""RMS norm by the one kernel that CUDA has for it, called for tensors that are on the CPU.

The CPU makes it of a dozen operators, and saves what most of them return. CUDA saves the input and a number for each
row. Since torch 2.8; `rms_norm_symint` in aten/src/ATen/native/layer_norm.cpp has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

_FORWARD = getattr(torch.ops.aten, "_fused_rms_norm", None)
_BACKWARD = getattr(torch.ops.aten, "_fused_rms_norm_backward", None)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """As `torch.nn.functional.rms_norm` on CUDA."""
    if torch.is_autocast_enabled("cpu") and input.dtype in (torch.float16, torch.bfloat16, torch.float32):
        input, weight = input.float(), None if weight is None else weight.float()
    other = weight is not None and weight.dtype != input.dtype
    if _BACKWARD is None or other or not input.is_floating_point():
        return functional.rms_norm(input, [*normalized_shape], weight, eps)
    made: torch.Tensor = _Fused.apply(input, [*normalized_shape], weight, eps)  # type: ignore[no-untyped-call]  # torch
    return made


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> torch.Tensor:
        assert _FORWARD is not None
        with torch._C._AutoDispatchBelowAutograd():  # where autograd is, it becomes many operators
            made, by_row = _FORWARD(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, by_row)
        ctx.shape = shape
        result: torch.Tensor = made
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        assert _BACKWARD is not None
        input, weight, by_row = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_input, of_weight = _BACKWARD(gradient, input, ctx.shape, by_row, weight, needed)
        return of_input if needed[0] else None, None, of_weight if needed[1] else None, None
