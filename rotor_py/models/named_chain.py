"""The base class of all networks, and the checks and initial weights that they share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from rotor_py.errors import InvalidValueError


class NamedChain(nn.Sequential):
    """A chain of named layers with its own constructor; its slices are plain `nn.Sequential`s."""

    def __getitem__(self, idx: slice | int) -> nn.Sequential | nn.Module:
        # nn.Sequential would call the subclass's constructor with the layers of the slice.
        if isinstance(idx, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[idx]))
        return super().__getitem__(idx)

    def initialise_convolutions(self) -> None:
        """Initialise all convolutions from the normal distribution of He et al."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def check_length(name: str, given: Sequence[object], length: int, meaning: str) -> None:
    """Raise ValueError unless the argument `name` has `length` elements."""
    if len(given) != length:
        message = f"{name} has {len(given)} elements; give {length}, {meaning}"
        raise InvalidValueError(message, kind="wrong_length", name=name, got=len(given))
