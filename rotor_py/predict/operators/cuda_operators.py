"""Calls whose operator depends on the device: on tensors of the CPU, the operators of CUDA.

Tensors that claim to be on CUDA cannot go backward where there is no GPU. So tensors are on the CPU, and the few calls
that run something else there are replaced. Batch norms run other kernels, too, but save as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from rotor_py.predict.operators.attention import Attention
from rotor_py.predict.operators.autocast import cast_down
from rotor_py.predict.operators.rms_norm import rms_norm

_ATTENTION = functional.scaled_dot_product_attention
_DROPOUT = (functional.dropout, torch.dropout)
_RMS_NORM = (functional.rms_norm, torch.rms_norm)


class CudaOperators(TorchFunctionMode):
    """While entered, calls run the operators that a CUDA device of this `compute_capability` would."""

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        super().__init__()
        self._capability = compute_capability

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return Attention(*cast_down(args), **cast_down(kwargs)).on(self._capability)
        if func in _DROPOUT:
            return _dropout(*args, **kwargs)
        if func in _RMS_NORM:
            return rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool | None = None
) -> torch.Tensor:
    """CUDA keeps a mask of one byte for each number, the CPU one as large as the numbers."""
    training = training if train is None else train
    if training and 0 < p < 1 and not inplace and input.numel():
        made: torch.Tensor = torch.native_dropout(input, p, True)[0]
        return made
    return functional.dropout(input, p, training, inplace)


@contextmanager
def cuda_operators(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Run the operators of CUDA, in backwards too, where what is checkpointed runs again."""
    mode = CudaOperators(compute_capability)
    with mode, _also_in_backwards(mode):
        yield


@contextmanager
def _also_in_backwards(mode: CudaOperators) -> Iterator[None]:
    """PyTorch hands `backward` and `grad` to modes, and inside of what it has handed over a mode is off."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        if any(each is mode for each in _get_current_function_mode_stack()):
            return run(*args, **kwargs)
        with mode:
            return run(*args, **kwargs)

    autograd._engine_run_backward = run_in_mode
    try:
        yield
    finally:
        autograd._engine_run_backward = run
