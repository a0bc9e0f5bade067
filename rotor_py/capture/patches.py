"""Functions of torch and transformers that are replaced while TorchDynamo traces a model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import BatchNorm
from rotor_profiling.torch_compat import is_fake_tensor as is_fake
from rotor_py.capture.guarded_branches import holds

# Functions of libraries, replaced by others while a model is captured.

Replaced = tuple[Any, str, Callable[..., Any]]
"""Who has the function, a module or a class; its name there; and what is to be there instead."""


class Replacement:
    """What `found` returns, in its place as long as any thread captures a model.

    Outside of traced code, what is put there has to do what was there before, so that other threads notice nothing.
    """

    def __init__(self, found: Callable[[], list[Replaced]]) -> None:
        self._found = found
        self._lock = threading.Lock()
        self._captures = 0
        self._originals: list[Replaced] = []

    def in_place(self) -> Replacement:
        """A context in which the functions are replaced."""
        return self

    # Not a generator with `contextmanager`, which costs more: every step comes here.
    def __enter__(self) -> None:
        with self._lock:
            self._captures += 1
            if self._originals:
                return
            for owner, name, function in self._found():
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


# Batch norms that average over all batches (`momentum=None`), as one operator of a captured graph.
#
# Such a layer reads from its buffer how many batches there were, as a number of Python. TorchDynamo would break the
# graph there. As one operator, the layer counts and reads while it runs.


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


def _batch_norm_forward() -> list[Replaced]:
    return [(BatchNorm, "forward", _forward())]


def has_batch_norms(model: nn.Module) -> bool:
    """Whether any layer of `model` has the forward that is replaced."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


batch_norms_in_graphs = Replacement(_batch_norm_forward).in_place
"""A context in which such layers do not break the graph of a model that is traced."""


# Products of several experts at once, also in a model of transformers that TorchDynamo traces.
#
# In plain training, transformers multiplies all experts by one kernel (`grouped_mm`). For TorchDynamo, this kernel
# knows bfloat16 alone, so in code that is traced, transformers multiplies them one by one: that takes longer, and on
# another device it may round otherwise. A captured graph is run operator by operator, so it can call what plain
# training calls.
#
# The function is private to transformers. Where a version has none of this name, its models are captured as it does it.

_EXPERTS = "transformers.integrations.moe"
_PRODUCT = "_grouped_mm"
Function = Callable[..., Any]


def grouped_products(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The product of the rows of each expert, which end at `offs`, with its matrix: as in plain training.

    Tensors without memory take the way that is made for them.
    """
    made: torch.Tensor
    if is_fake(input) or is_fake(weight):
        made = torch.ops.transformers.grouped_mm_fallback(input.to(weight.dtype), weight, offs=offs)
    else:
        made = getattr(sys.modules[_EXPERTS], _PRODUCT)(input, weight, offs)
    return made


@cache  # so that TorchDynamo meets the same function at every step
def _at_once(original: Function) -> Function:
    operator = torch_compat.allow_in_graph(grouped_products)

    def multiply_experts(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
        return (operator if torch.compiler.is_compiling() else original)(input, weight, offs)

    return multiply_experts


def _grouped_product() -> list[Replaced]:
    # Only where a model may be the library's: nothing is imported for it.
    library = sys.modules.get(_EXPERTS)
    return [(library, _PRODUCT, _at_once(getattr(library, _PRODUCT)))] if hasattr(library, _PRODUCT) else []


experts_at_once = Replacement(_grouped_product).in_place
"""A context in which experts are multiplied at once in code that is traced."""


# What transformers asks about an attention mask, asked while TorchDynamo traces its models as well.
#
# In plain training, transformers leaves out a mask that masks nothing: `scaled_dot_product_attention` is then called
# with `is_causal=True` and `enable_gqa=True`, and flash attention serves it. Whether a mask masks anything is a
# question about data, so while it is traced, transformers builds a dense mask always, and repeats keys and values for
# each head. Here it asks with `holds` instead (see the Note in `guarded_branches.py`).
#
# The functions are private to transformers. Where a version has none of such a name, its models are captured as that
# version does it: with a dense mask, which is right, and needs more.

_MASKS = "transformers.masking_utils"


@cache  # so that TorchDynamo meets the same function at every step
def _leaving_out_padding(original: Function) -> Function:
    def prepare_padding_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        """The part of a mask that says which tokens are padding; None if there is no padding.

        What follows treats None as a mask of which all is true.
        """
        mask: torch.Tensor | None = original(*args, **kwargs)
        if mask is None or not torch.compiler.is_compiling() or mask.dtype != torch.bool:
            return mask
        return None if holds(mask.all()) else mask

    return prepare_padding_mask


@cache
def _leaving_out_packing(original: Function) -> Function:
    def find_packed_sequence_indices(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        """For each token the number of its sequence within a packed batch, by positions; None if none is packed."""
        indices: torch.Tensor | None = original(*args, **kwargs)
        if indices is None or not torch.compiler.is_compiling():
            return indices
        return None if holds((indices[:, -1] == 0).all()) else indices

    return find_packed_sequence_indices


_ASKING: dict[str, Callable[[Function], Function]] = {
    "prepare_padding_mask": _leaving_out_padding,
    "find_packed_sequence_indices": _leaving_out_packing,
}


def _mask_functions() -> list[Replaced]:
    # Only where a model may be the library's: nothing is imported for it.
    library = sys.modules.get(_MASKS)
    names = [name for name in _ASKING if hasattr(library, name)]
    return [(library, name, _ASKING[name](getattr(library, name))) for name in names]


masks_asked_about = Replacement(_mask_functions).in_place
"""A context in which transformers asks about its masks in code that is traced."""
