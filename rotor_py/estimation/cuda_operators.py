"""Run on CPU tensors the operators that PyTorch chooses on CUDA.

On a machine without a GPU, fake tensors on "cuda" cannot run a backward. So fake tensors are on the CPU, and calls for
which PyTorch chooses another operator on CUDA are replaced, but not batch norm, which saves equally many bytes.

Attention without a fused kernel saves an element for each pair of tokens; with a fused kernel, one for each token.
The kernel is chosen as in `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` of torch 2.13.

RMS norm: since torch 2.8, CUDA has a fused kernel, which saves the input and one element per row; the CPU runs a dozen
operators. The kernel is chosen as in `rms_norm_symint` of aten/src/ATen/native/layer_norm.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rotor_profiling import torch_compat
from rotor_profiling.isolate import set_meanwhile
from rotor_profiling.torch_compat import function_mode_stack
from rotor_py.estimation.cuda_autocast import cast_down

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
Backend = Literal["cudnn", "flash", "efficient", "math"]


@dataclass(frozen=True, slots=True)
class Attention:
    """The arguments of one call of `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def on(self, compute_capability: tuple[int, int]) -> torch.Tensor:
        given: list[Any] = [self.query, self.key, self.value]
        scale, backend = self.scale, self.backend(compute_capability)
        if backend == "math":
            made = _aten._scaled_dot_product_attention_math(
                *given, self._bias(), self.dropout_p, self.is_causal, scale=scale, enable_gqa=self.enable_gqa
            )
        elif backend == "cudnn":
            made = _aten._scaled_dot_product_cudnn_attention(
                *given, self._bias(), self._has_gradient(), self.dropout_p, self.is_causal, False, scale=scale
            )
        elif backend == "efficient":
            heads = self.query.shape[1]  # with `enable_gqa`, keys and values are repeated for every query head
            given[1:] = [
                each if each.shape[1] == heads else each.repeat_interleave(heads // each.shape[1], 1)
                for each in given[1:]
            ]
            made = _aten._scaled_dot_product_efficient_attention(
                *given, self._padded_bias(), self._has_gradient(), self.dropout_p, self.is_causal, scale=scale
            )
        else:
            width = self.query.shape[-1]
            if width % 8:
                given = [functional.pad(each, (0, 8 - width % 8)) for each in given]
            scale = 1 / math.sqrt(width) if scale is None else scale
            made = _aten._scaled_dot_product_flash_attention(*given, self.dropout_p, self.is_causal, scale=scale)
            return cast(torch.Tensor, made[0][..., :width])
        return cast(torch.Tensor, made[0])

    def backend(self, compute_capability: tuple[int, int]) -> Backend:
        """Return the first kernel, in PyTorch's order, that is enabled and supports this call."""
        flags = torch.backends.cuda
        if self._suits_cudnn(compute_capability) and flags.cudnn_sdp_enabled():
            return "cudnn"
        if self._suits_flash(compute_capability) and flags.flash_sdp_enabled():
            return "flash"
        if self._suits_efficient(compute_capability) and flags.mem_efficient_sdp_enabled():
            return "efficient"
        return "math"

    def _suits_cudnn(self, capability: tuple[int, int]) -> bool:
        # As `check_prefer_cudnn_attention`: capabilities 9.0 and 10.0 prefer cuDNN 9.15 or later, in torch since 2.11.
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        preferred = capability in ((9, 0), (10, 0)) and version >= (2, 11)
        longer = self.query.dim() == 4 and min(self.query.shape[2], self.key.shape[2]) > 1
        return preferred and longer and self.query.dtype in _HALF and self._heads_fit(128)

    def _suits_flash(self, capability: tuple[int, int]) -> bool:
        half = self.query.dtype in _HALF
        if self.attn_mask is not None or not half or capability < (8, 0) or not self._heads_fit(256, pads=True):
            return False
        width = self.query.shape[-1]
        # On these devices, with less shared memory, flash attention has no backward for the widest heads.
        small = capability in ((8, 6), (8, 9), (12, 0), (12, 1)) and self._has_gradient()
        return not (small and (192 < width <= 224 or (width > 224 and self.dropout_p > 0)))

    def _suits_efficient(self, capability: tuple[int, int]) -> bool:
        if self.query.dtype == torch.bfloat16 and capability < (8, 0):
            return False
        known = self.query.dtype in (*_HALF, torch.float32)
        align = 4 if self.query.dtype == torch.float32 else 8
        widths = (self.query.shape[-1], self.value.shape[-1])
        return known and self.query.dim() == 4 and all(width % align == 0 for width in widths)

    def _heads_fit(self, widest: int, *, pads: bool = False) -> bool:
        width = self.query.shape[-1]
        same = width == self.key.shape[-1] == self.value.shape[-1]
        return self.query.dim() == 4 and same and width <= widest and (pads or width % 8 == 0)

    def _has_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(each.requires_grad for each in (self.query, self.key, self.value))

    def _bias(self) -> torch.Tensor | None:
        """Return the mask as a bias to add to the scores, as `convert_boolean_attn_mask` does; None without a mask."""
        mask = self.attn_mask
        if mask is None or mask.dtype != torch.bool:
            return mask
        zero, never = self.query.new_zeros(()), self.query.new_full((), -math.inf)
        return torch.where(mask, zero, never)

    def _padded_bias(self) -> torch.Tensor | None:
        """Return the bias with rows padded in memory to multiples of eight elements (`pad_bias`), for all heads."""
        bias = self._bias()
        if bias is None:
            return None
        if (beyond := bias.shape[-1] % 8) != 0:
            bias = functional.pad(bias, (0, 8 - beyond))[..., : bias.shape[-1]]
        return bias.expand(*self.query.shape[:3], self.key.shape[2])


_FORWARD: Any = getattr(_aten, "_fused_rms_norm", None)
_BACKWARD: Any = getattr(_aten, "_fused_rms_norm_backward", None)


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu") and input.dtype in (*_HALF, torch.float32):
        input, weight = input.float(), None if weight is None else weight.float()
    shape, other = [*normalized_shape], weight is not None and weight.dtype != input.dtype
    if _BACKWARD is None or other or not input.is_floating_point():
        return functional.rms_norm(input, shape, weight, eps)
    made: torch.Tensor = _FusedRmsNorm.apply(input, shape, weight, eps)  # type: ignore[no-untyped-call] # torch's
    return made


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> torch.Tensor:
        with torch_compat.AutoDispatchBelowAutograd():  # autograd would decompose the operator on the CPU
            made, by_row = _FORWARD(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, by_row)
        ctx.shape = shape
        return cast(torch.Tensor, made)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, by_row = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_input, of_weight = _BACKWARD(gradient, input, ctx.shape, by_row, weight, needed)
        return of_input if needed[0] else None, None, of_weight if needed[1] else None, None


class CudaOperators(TorchFunctionMode):
    """Function mode that replaces attention, dropout and RMS norm by CUDA's for a `compute_capability`."""

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        super().__init__()
        self._capability = compute_capability

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return Attention(*cast_down(args), **cast_down(kwargs)).on(self._capability)
        if func in (functional.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if func in (functional.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool | None = None
) -> torch.Tensor:
    """Call CUDA's dropout, which saves a mask of one byte per element; the CPU's saves one of the input's dtype."""
    training = training if train is None else train
    if training and 0 < p < 1 and not inplace and input.numel():
        made: torch.Tensor = torch.native_dropout(input, p, True)[0]
        return made
    return functional.dropout(input, p, training, inplace)


@contextmanager
def cuda_operators(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Within the context, run CUDA's operators, also in backwards, for which PyTorch turns function modes off."""
    mode = CudaOperators(compute_capability)
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if any(each is mode for each in function_mode_stack()) else mode:
            return run(*args, **kwargs)

    with set_meanwhile((autograd, {"_engine_run_backward": run_in_mode})), mode:
        yield
