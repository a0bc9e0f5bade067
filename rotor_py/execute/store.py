"""Store values between a forward and a backward, by the index of their stage or layer."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from rotor_profiling import storage_bytes, tensors_in
from rotor_profiling.torch_compat import tree_map_only
from rotor_py.stage.compression import Converted


class ActivationStore:
    """Values (tensors, or nested structures of them) by index. They are detached, so that they hold no graph.

    With a `storage_dtype`, wider floating tensors are kept in it, and come back in their own dtype, rounded. A tensor
    of finite numbers that overflows in it (float16 ends at 65504) is kept as it is.
    """

    def __init__(self, storage_dtype: torch.dtype | None = None) -> None:
        self.storage_dtype = storage_dtype
        self._held: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, index: object) -> bool:
        return index in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __getitem__(self, index: int) -> Any:
        value = self._held[index]
        return value if self.storage_dtype is None else tree_map_only(Converted, Converted.tensor, value)

    def get(self, index: int) -> Any:
        return self[index] if index in self._held else None

    def keep(self, index: int, value: Any) -> None:
        """Keep `value` at `index`, and replace an earlier one."""
        value = tree_map_only(torch.Tensor, torch.Tensor.detach, value)
        self._held[index] = value if self.storage_dtype is None else tree_map_only(torch.Tensor, self._packed, value)

    def keep_first(self, index: int, value: Any) -> None:
        """Keep `value` unless there is one: a graph may hold the earlier one anyway, and a copy would come on top."""
        if index not in self._held:
            self.keep(index, value)

    def adopt(self, index: int, other: ActivationStore, there: int) -> None:
        """Share the value of `other` at the index `there`: it is in memory once."""
        self._held[index] = other._held[there]

    def clear(self) -> None:
        self._held.clear()

    def drop_all_but(self, live: AbstractSet[int]) -> None:
        for index in self._held.keys() - live:
            del self._held[index]

    def copy(self) -> ActivationStore:
        twin = ActivationStore(self.storage_dtype)
        twin._held = dict(self._held)
        return twin

    def held_tensors(self, index: int | None = None) -> list[torch.Tensor]:
        """Return the tensors in memory, at `index` or all, in their storage dtypes."""
        values = list(self._held.values()) if index is None else self._held[index]
        return tensors_in(tree_map_only(Converted, lambda each: each.values, values))

    @property
    def nbytes(self) -> int:
        """Bytes of storage behind all values, each storage once."""
        return storage_bytes(self.held_tensors())

    def _packed(self, tensor: torch.Tensor) -> Any:
        dtype = self.storage_dtype
        assert dtype is not None
        if not tensor.is_floating_point() or tensor.element_size() <= dtype.itemsize:
            return tensor
        small = tensor.to(dtype)
        # Compared, because an infinity that was there before is no overflow.
        overflown = bool((small.isinf() != tensor.isinf()).any())
        return tensor if overflown else Converted(small, tensor.dtype)
