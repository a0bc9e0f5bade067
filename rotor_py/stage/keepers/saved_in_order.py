"""What a run saves for its backward, in order, so that it can be compared with what another run saves."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from rotor_profiling.torch_classes import is_fake
from rotor_py.stage.keepers.saved import Saved


class SavedInOrder:
    """Receives what a run saves, from its beginning to its end, and holds nothing of it.

    Of every tensor there is its shape, and the sum of its bytes: to hold its numbers would take as much memory as the
    run itself.
    """

    ends_after = None

    def __init__(self) -> None:
        self.found: list[Hashable] = []

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        """Note a tensor."""
        self.found.append((tensor.shape, tensor.dtype, tensor.layout, _sum_of_bytes(tensor.detach())))


def _sum_of_bytes(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or is_fake(tensor) or not tensor.numel():
        return None
    return int(tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
