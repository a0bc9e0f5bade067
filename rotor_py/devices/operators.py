"""Operators of ATen by what they compute, and their arguments by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_fused_attention_overrideable,
}
ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward,
}
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward


def argument(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument called `name`: as it was given, or its default. None where the operator has no such argument."""
    for number, one in enumerate(func._schema.arguments):
        if one.name == name:
            return args[number] if number < len(args) else kwargs.get(name, one.default_value)
    return None


def query_key_value(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What an attention reads, forward or backward: (batch, heads, length, width) each."""
    query, key, value = (argument(func, args, kwargs, name) for name in ("query", "key", "value"))
    return query, key, value
