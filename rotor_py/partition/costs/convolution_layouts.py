"""How Inductor lays out the images and weights of convolutions on the CPU, whatever the graph says.

Their channels come last, and what comes from outside in another layout is copied: weights. The library's own copies are
others, too: deep in a U-Net, scratch memory is three times as large as for the layout of the graph, and early in it, a
tenth.

The backward of a depthwise convolution is an exception (seen in torch 2.13). Where the backward runs no convolution of
the forward again, Inductor gives it an image with rows before channels, the gradient as the graph would have it, and
the weight as it is. That takes longer, and for a ConvNeXt a fiftieth of the scratch memory. Where it runs one again,
all images have their channels last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rotor_py.partition.joint_graph import known

Layout = Callable[[torch.Tensor], torch.Tensor]

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By number of dimensions, the layout with channels last."""


def layouts_of(node: fx.Node, *, convolves_again: bool) -> tuple[Layout, ...]:
    """How the first arguments of a convolution on the CPU are laid out: of its backward the gradient, image and weight.

    `convolves_again` says whether the backward runs a convolution of the forward again. Empty for all other nodes.
    """
    if node.target not in (_FORWARD, _BACKWARD) or not _on_cpu(node):
        return ()
    if node.target is _FORWARD:
        return _channels_last, _channels_last
    if _is_depthwise(node) and not convolves_again:
        return torch.Tensor.contiguous, _rows_before_channels, _as_it_is
    return _channels_last, _channels_last, _channels_last


def copied_bytes(node: fx.Node, layouts: tuple[Layout, ...]) -> int:
    """The bytes of the copies that are made for these layouts."""
    wanted: Any = node.args[-1] if node.args else None
    # Without a gradient of the image, nobody reads the weight.
    read = layouts[:-1] if node.target is _BACKWARD and not wanted[0] else layouts
    copied = (each for each, layout in zip(node.args, read, strict=False) if layout is _channels_last)
    return sum(map(_bytes_to_lay_out, copied))


def _is_depthwise(node: fx.Node) -> bool:
    weight, groups = node.args[2], node.args[9]
    assert isinstance(weight, fx.Node)
    shape = weight.meta["val"].shape
    return len(shape) == 4 and bool(shape[1] == 1 and groups == shape[0] and groups != 1)


def _channels_last(value: torch.Tensor) -> torch.Tensor:
    return value.to(memory_format=_LAST.get(value.dim(), torch.preserve_format))


def _rows_before_channels(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value


def _bytes_to_lay_out(value: Any) -> int:
    """The bytes of a copy of `value` with its channels last; 0 if Inductor's own code makes it, which lays it out."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) and value.op == "placeholder" else None
    layout = _LAST.get(tensor.dim()) if isinstance(tensor, torch.Tensor) else None
    if tensor is None or layout is None or tensor.is_contiguous(memory_format=layout):
        return 0
    size: int = known(tensor.numel()) * tensor.element_size()
    return size


def _on_cpu(node: fx.Node) -> bool:
    value = node.all_input_nodes[0].meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"
