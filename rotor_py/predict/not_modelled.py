"""What a step without memory does not show of a model: layers whose costs are others where they really run."""

from __future__ import annotations

from torch import nn

from rotor_py.devices.device import Device
from rotor_py.measure.cut import is_chain, layers
from rotor_py.report.basis import NotModelled

_RECURRENT = nn.RNNBase, nn.RNNCellBase


def not_modelled(model: nn.Module, device: Device) -> NotModelled:
    """What of `model` is predicted for `device` with more or less than it takes there.

    Recurrent layers run as a whole by cuDNN or MIOpen, and keep what these libraries say: the CPU's operators stand in.
    Layers of a chain are stored in part only if TorchDynamo captures them, which it does not without memory.
    """
    found = model.named_modules() if device.vendor != "cpu" else ()
    return NotModelled(
        recurrent=tuple(name or type(each).__name__ for name, each in found if isinstance(each, _RECURRENT)),
        whole_layers=sum(any(True for _ in each.children()) for _, each in layers(model)) if is_chain(model) else 0,
    )
