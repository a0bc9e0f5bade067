"""Recurrent layers, which are planned by other operators than those that run on the device."""

from __future__ import annotations

from torch import nn

from rotor_py.devices.device import Device


def recurrent_layers(model: nn.Module, device: Device) -> tuple[str, ...]:
    """The names of the layers of `model` that cuDNN, or MIOpen, runs as a whole on `device`.

    They keep what these libraries say, and no tensor without memory shows it: the CPU's operators stand in.
    """
    if device.vendor == "cpu":
        return ()
    layers = nn.RNNBase, nn.RNNCellBase
    return tuple(name or type(each).__name__ for name, each in model.named_modules() if isinstance(each, layers))
