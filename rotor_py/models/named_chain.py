"""The base class of all networks."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class NamedChain(nn.Sequential):
    """A chain of named layers with its own constructor; its slices are plain `nn.Sequential`s."""

    def __getitem__(self, idx: slice | int) -> nn.Sequential | nn.Module:
        # nn.Sequential would call the subclass's constructor with the layers of the slice.
        if isinstance(idx, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[idx]))
        return super().__getitem__(idx)
