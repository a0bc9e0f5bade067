"""Layers that take something else where they really run: what a step without memory does not show of a model."""

from __future__ import annotations

from torch import nn

from rotor_py.devices.device import Device

_RECURRENT = nn.RNNBase, nn.RNNCellBase


def recurrent_layers(model: nn.Module, device: Device) -> tuple[str, ...]:
    """The names of recurrent layers, which run as a whole on a GPU, by cuDNN or MIOpen, and keep what these libraries
    say: the CPU's operators stand in. On a CPU there are none.
    """
    found = model.named_modules() if device.vendor != "cpu" else ()
    return tuple(name or type(each).__name__ for name, each in found if isinstance(each, _RECURRENT))
