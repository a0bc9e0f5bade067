"""Sums of gradients that autograd's engine makes, which are in place where it has nothing but tensors.

Of a tensor that is used several times, the engine adds up the gradients as they come. It adds to the first of them in
place where nobody else holds that (`accumulate` in torch/csrc/autograd/input_buffer.cpp), but never while a dispatch
mode is active: then it makes a new tensor, and lets the old one go. What is predicted is a step without such a mode.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling.storage import local

_ADD = torch.ops.aten.add.Tensor
_ENGINE = _engine_run_backward.__code__
_BETWEEN = ("/torch/_dynamo/", "/torch/_compile.py", "/torch/_ops.py")
"""Files whose functions are between modes, to keep TorchDynamo out of them, and to call the next one."""


class AddedGradients:
    """Tells which sums the engine would make in place, if nobody but the engine holds their first summand.

    One that it would not is taken for one that it would: where gradients are retained (`retain_grad`) from an earlier
    backward, the new one is added to them, and never in place.
    """

    def __init__(self) -> None:
        self._node: tuple[str, int] | None = None
        """What the node is called that ran last. Not the node itself: that would hold what it refers to."""
        self._made: set[int] = set()
        """ids of what was made since that node began: it is a part of a formula, and no gradient that waits"""

    def first_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The gradient that the engine is about to add another one to; None for any other call of an operator."""
        node = torch._C._current_autograd_node()
        called = None if node is None else (node.name(), node._sequence_nr())
        if called != self._node:
            self._node = called
            self._made.clear()
        # With a graph of the backward, the engine adds nothing in place.
        if func is not _ADD or node is None or kwargs or torch.is_grad_enabled():
            return None
        one, other = args
        if id(one) in self._made and not _gives_twice(node):
            return None
        if not (_is_plain(one) and _is_plain(other) and _called_by_engine(sys._getframe(2))):
            return None
        shared = one.untyped_storage()._cdata == other.untyped_storage()._cdata
        return None if shared or not torch.ops.aten.is_non_overlapping_and_dense.default(one) else one

    def made(self, tensors: list[torch.Tensor]) -> None:
        """Operators have returned these."""
        if self._node is not None:
            self._made.update(map(id, tensors))


def _gives_twice(node: Any) -> bool:
    """Whether several gradients that a node returns are of the same tensor."""
    given = [each for each in node.next_functions if each[0] is not None]
    return len({*given}) < len(given)


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and local(tensor) is tensor and tensor.layout == torch.strided


def _called_by_engine(frame: FrameType | None) -> bool:
    """Whether no code in Python is between the engine and the call of an operator, but for modes."""
    while frame is not None and _is_of_modes(frame):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def _is_of_modes(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == TorchDispatchMode.__torch_dispatch__.__name__ or any(
        each in code.co_filename.replace("\\", "/") for each in _BETWEEN
    )
