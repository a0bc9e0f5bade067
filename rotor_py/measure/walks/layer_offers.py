"""What somebody else finds of the layers of a chain, which say nothing about themselves."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import nn

from rotor_py.stage.protocol import StageOffers


class LayerOffers(Protocol):
    """Finds what layers offer, while they are measured."""

    def look_at(
        self, function: nn.Module, name: str, kind: Hashable, value: Any, device: torch.device, saved_bytes: int
    ) -> None:
        """Find out what a layer of this kind offers on the input `value`. Nothing of the layer is changed.

        Beside its parameters, input and output, autograd saves `saved_bytes` of it.
        """

    def of(self, function: nn.Module) -> StageOffers | None:
        """What was found of a layer; None if that is nothing."""
