"""Products of several experts at once, also in a model of transformers that TorchDynamo traces.

In plain training, transformers multiplies all experts by one kernel (`grouped_mm`). For TorchDynamo, this kernel knows
bfloat16 alone, so in code that is traced, transformers multiplies them one by one: that takes longer, and on another
device it may round otherwise. A captured graph is run operator by operator, so it can call what plain training calls.

The function is private to transformers. Where a version has none of this name, its models are captured as it does it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch._subclasses.fake_tensor import is_fake

from rotor_py.capture.replaced.replacement import Replaced, Replacement

_LIBRARY = "transformers.integrations.moe"
_NAME = "_grouped_mm"
Function = Callable[..., Any]


def grouped_products(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The product of the rows of each expert, which end at `offs`, with its matrix: as in plain training.

    Tensors without memory take the way that is made for them.
    """
    made: torch.Tensor
    if is_fake(input) or is_fake(weight):
        made = torch.ops.transformers.grouped_mm_fallback(input.to(weight.dtype), weight, offs=offs)
    else:
        made = getattr(sys.modules[_LIBRARY], _NAME)(input, weight, offs)
    return made


@cache  # so that TorchDynamo meets the same function at every step
def _in_graphs(original: Function) -> Function:
    operator = torch._dynamo.allow_in_graph(grouped_products)

    def multiply_experts(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
        return (operator if torch.compiler.is_compiling() else original)(input, weight, offs)

    return multiply_experts


def _found() -> list[Replaced]:
    # Only where a model may be the library's: nothing is imported for it.
    library = sys.modules.get(_LIBRARY)
    return [(library, _NAME, _in_graphs(getattr(library, _NAME)))] if hasattr(library, _NAME) else []


experts_at_once = Replacement(_found).in_place
"""A context in which experts are multiplied at once in code that is traced."""
