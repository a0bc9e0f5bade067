"""What transformers asks about an attention mask, asked while TorchDynamo traces its models as well.

In plain training, transformers leaves out a mask that masks nothing: `scaled_dot_product_attention` is then called with
`is_causal=True` and `enable_gqa=True`, and flash attention serves it. Whether a mask masks anything is a question about
data, so while it is traced, transformers builds a dense mask always, and repeats keys and values for each head. Here it
asks with `holds` instead (see the Note in `data_questions.py`).

The functions are private to transformers. Where a version has none of such a name, its models are captured as that
version does it: with a dense mask, which is right, and needs more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from rotor_py.capture.data_questions import holds
from rotor_py.capture.replaced.replacement import Replaced, Replacement

_LIBRARY = "transformers.masking_utils"
Function = Callable[..., Any]


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


def _found() -> list[Replaced]:
    # Only where a model may be the library's: nothing is imported for it.
    library = sys.modules.get(_LIBRARY)
    names = [name for name in _ASKING if hasattr(library, name)]
    return [(library, name, _ASKING[name](getattr(library, name))) for name in names]


masks_asked_about = Replacement(_found).in_place
"""A context in which transformers asks about its masks in code that is traced."""
