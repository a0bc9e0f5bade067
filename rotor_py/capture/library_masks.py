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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from rotor_py.capture.data_questions import holds

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


class _Replacement:
    """The functions that ask, in the place of the library's, as long as any thread captures a model.

    Outside of traced code they do what the library's own do, so other threads notice nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0
        self._replaced: list[tuple[Any, str, Function]] = []

    def begin(self) -> None:
        with self._lock:
            self._captures += 1
            # Only where a model may be the library's: nothing is imported for it.
            library = sys.modules.get(_LIBRARY)
            if self._replaced or library is None:
                return
            self._replaced = [(library, name, getattr(library, name)) for name in _ASKING if hasattr(library, name)]
            for _, name, original in self._replaced:
                setattr(library, name, _ASKING[name](original))

    def end(self) -> None:
        with self._lock:
            self._captures -= 1
            if self._captures:
                return
            for library, name, original in self._replaced:
                setattr(library, name, original)
            self._replaced = []


_replacement = _Replacement()


@contextmanager
def masks_asked_about() -> Iterator[None]:
    """Have transformers ask about its masks in code that is traced inside this context."""
    _replacement.begin()
    try:
        yield
    finally:
        _replacement.end()
