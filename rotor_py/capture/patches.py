"""Replace functions of torch and transformers while TorchDynamo traces a model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch.nn import functional as F

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import BatchNorm
from rotor_profiling.torch_compat import is_fake_tensor as is_fake
from rotor_py.capture.guarded_branches import holds

Replaced = tuple[Any, str, Callable[..., Any]]
"""The owner of the function, a module or a class; its name there; its replacement."""
Function = Callable[..., Any]


class _Replacement:
    """Replaces functions of torch and transformers as long as any thread captures a model.

    Outside traced code, a replacement has to behave like the original, so that other threads see no difference.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0
        self._originals: list[Replaced] = []

    # Not a `contextmanager` generator, which costs more: every step comes here.
    def __enter__(self) -> None:
        with self._lock:
            self._captures += 1
            if self._originals:
                return
            for owner, name, function in _replaced():
                self._originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, function)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._captures -= 1
            if self._captures:
                return
            for owner, name, original in self._originals:
                setattr(owner, name, original)
            self._originals = []


# A batch norm that averages over all batches (`momentum=None`) reads its count of batches as a Python number, at which
# TorchDynamo would break the graph. As one operator, the layer counts and reads when it runs.


def batch_norm_over_all(
    value: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    batches: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    batches.add_(1)
    momentum = 0.0 if is_fake(batches) else 1.0 / float(batches)  # a fake tensor has no number
    return F.batch_norm(value, mean, variance, weight, bias, True, momentum, eps)


@cache  # TorchDynamo has to meet the same function at every step
def _forward() -> Any:
    original = BatchNorm.forward
    operator = torch_compat.allow_in_graph(batch_norm_over_all)

    def forward(self: Any, input: torch.Tensor) -> Any:
        averages = self.training and self.momentum is None and self.num_batches_tracked is not None
        if not (averages and self.track_running_stats and torch.compiler.is_compiling()):
            return original(self, input)
        self._check_input_dim(input)
        buffers = self.running_mean, self.running_var, self.num_batches_tracked
        return operator(input, *buffers, self.weight, self.bias, self.eps)

    return forward


# Plain training multiplies all experts by one kernel (`grouped_mm`). TorchDynamo knows it for bfloat16 only, so traced
# transformers multiplies experts one by one, which takes longer and may round differently. A captured graph can
# call the kernel. A version of transformers without this private name has its models captured as it traces them.

_EXPERTS = "transformers.integrations.moe"
_PRODUCT = "_grouped_mm"


def grouped_products(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert, which end at `offs`, by its matrix, as plain training does."""
    made: torch.Tensor
    if is_fake(input) or is_fake(weight):
        made = torch.ops.transformers.grouped_mm_fallback(input.to(weight.dtype), weight, offs=offs)
    else:
        made = getattr(sys.modules[_EXPERTS], _PRODUCT)(input, weight, offs)
    return made


@cache  # TorchDynamo has to meet the same function at every step
def _at_once(original: Function) -> Function:
    operator = torch_compat.allow_in_graph(grouped_products)

    def multiply_experts(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
        return (operator if torch.compiler.is_compiling() else original)(input, weight, offs)

    return multiply_experts


# In plain training, transformers drops a mask that masks nothing, for flash attention. That depends on data, so traced
# code always builds a dense mask, and repeats keys and values for each head. The replacements ask with `holds` instead
# (see the Note in `guarded_branches.py`). A version of transformers without these private names gets a dense mask,
# which is correct and needs more memory.

_MASKS = "transformers.masking_utils"


# Whether a mask masks nothing, and whether no sequence is packed.
_ASKING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prepare_padding_mask": lambda mask: mask.all(),
    "find_packed_sequence_indices": lambda indices: (indices[:, -1] == 0).all(),
}


@cache  # TorchDynamo has to meet the same function at every step
def _asking(original: Function, has_no_effect: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    def ask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = original(*args, **kwargs)
        if found is None or not torch.compiler.is_compiling() or found.is_floating_point():
            return found
        return None if holds(has_no_effect(found)) else found

    return ask


def _replaced() -> list[Replaced]:
    # Only where a model may be the library's: this imports nothing.
    experts, masks = sys.modules.get(_EXPERTS), sys.modules.get(_MASKS)
    found: list[Replaced] = [(BatchNorm, "forward", _forward())]
    if hasattr(experts, _PRODUCT):
        found.append((experts, _PRODUCT, _at_once(getattr(experts, _PRODUCT))))
    names = [name for name in _ASKING if hasattr(masks, name)]
    return [*found, *((masks, name, _asking(getattr(masks, name), _ASKING[name])) for name in names)]


functions_replaced = _Replacement()
"""Context in which traced code calls the replacements."""
