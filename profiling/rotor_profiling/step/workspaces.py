"""What libraries allocate on a CUDA device when they are first asked, and keep: there before a step is planned."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from rotor_profiling.instruments import prediction


def allocate_workspaces(model: nn.Module, device: torch.device) -> None:
    """Have the memory allocated that matrix products take for good, if `model` has any: in forwards and in backwards.

    cuBLAS and cuBLASLt have a workspace in every thread, which PyTorch allocates when the thread first asks for it
    (`getCurrentCUDABlasHandle` and `getCUDABlasLtWorkspace` in aten/src/ATen/cuda). The engine runs backwards in a
    thread of its own, and a linear layer that is run again there needs what so far only forwards needed: on an H200
    with torch 2.11, 1 MiB that was not there when the step was planned. Where measurements are read from a file,
    no backward has run at all.
    """
    if device.type == "cuda" and prediction() is None and any(each.dim() == 2 for each in model.parameters()):
        _allocate(device, torch.cuda.current_stream(device).cuda_stream)


@cache  # once for each stream, as workspaces are
def _allocate(device: torch.device, stream: int) -> None:
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        scalar = torch.zeros((), device=device, dtype=torch.float32, requires_grad=True)
        _Both.apply(scalar).backward()  # type: ignore[no-untyped-call]  # torch's


class _Both(torch.autograd.Function):
    """Multiplies in its forward, and again in its backward."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor) -> torch.Tensor:
        return _product(scalar)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        return _product(gradients[0])


def _product(scalar: torch.Tensor) -> torch.Tensor:
    """Of a linear layer with a bias, which cuBLASLt computes, and of two matrices."""
    with torch.no_grad():
        square = scalar.new_zeros(16, 16)
        return torch.addmm(square[0], square, square).mm(square).sum()
