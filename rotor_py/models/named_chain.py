"""The base class of the networks in this folder, and a check of their arguments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from rotor_py.errors import InvalidValueError


class NamedChain(nn.Sequential):
    """`nn.Sequential` whose slices are plain `nn.Sequential`s, as subclasses have constructors with other arguments."""

    def __getitem__(self, idx: slice | int) -> nn.Sequential | nn.Module:
        # `nn.Sequential` would pass the layers to the constructor of the subclass.
        if isinstance(idx, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[idx]))
        return super().__getitem__(idx)

    def initialise_convolutions(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def check_length(name: str, given: Sequence[object], length: int, meaning: str) -> None:
    """Raise ValueError unless the argument `name` has `length` elements; `meaning` describes them in the message."""
    if len(given) != length:
        message = f"{name} has {len(given)} elements; give {length}, {meaning}"
        raise InvalidValueError(message, kind="wrong_length", name=name, got=len(given))
