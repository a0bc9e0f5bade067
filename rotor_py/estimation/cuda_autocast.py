"""Autocast as on CUDA, for tensors of the CPU: what it casts there is not what it casts here.

On CUDA, softmax, norms, powers and sums give 32 bits, which are kept for the backward; on the CPU they stay in the
dtype of the region. Autocast is a kernel for each operator, in front of the others, so inside `cuda_autocast` those of
CUDA's lists stand where the CPU's were, for the whole process. The CPU's own casts to low precision stay where CUDA has
the same: they also keep a weight that was cast for its next use.

What autocast does on CUDA, operator by operator: the lists of `aten/src/ATen/autocast_mode.h` of torch 2.13.

Names are those of ATen, with the overload where there is one. Operators that are in none of the lists run in the dtype
of what they are given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import tree_leaves, tree_map_only
from rotor_py.errors import InvalidStateError


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
""")
"""Arguments are cast to the dtype of the region."""

FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""")
"""Arguments are cast to 32 bits."""

FLOAT32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""Those that take the dtype of their result are given 32 bits, unless the caller has named one."""

FLOAT32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""The same by another overload, which has the dtype as its last argument."""

WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
"""Arguments of several dtypes are cast to the widest of them."""

REFUSED = ("binary_cross_entropy",)
"""It raises an error: in low precision, its logarithm overflows."""


_KEY = "AutocastCPU"
_WIDTHS = (torch.float16, torch.bfloat16, torch.float32)
"""What autocast casts, which leaves 64 bits alone."""
_inside: ContextVar[bool] = ContextVar("rotor_py.estimation.cuda_autocast", default=False)
_Operator = Callable[..., Any]
_Kernel = Callable[..., Any]


def region(dtype: torch.dtype | None) -> Any:
    """A region of autocast with this dtype, for tensors that stand for those of CUDA; None is none."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def cast_down(value: Any) -> Any:
    """Tensors in a nested structure as an operator that runs in low precision gets them here; else as they are."""
    return _cast(value, torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else value


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside, regions of autocast cast on the CPU what they cast on CUDA, and those for CUDA are on for the CPU."""
    if _inside.get():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    token = _inside.set(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced, which is what we want
            _replace_kernels(library)
        with _for_cpu():
            yield
    finally:
        _inside.reset(token)
        library._destroy()


def _replace_kernels(library: torch.library.Library) -> None:
    present = {name.removeprefix("aten::") for name in torch_compat.dispatch_get_registrations_for_dispatch_key(_KEY)}
    kernels: dict[str, _Kernel] = {}
    for names, kernel in (
        ([name for name in LOWER_PRECISION if name not in present], _in_low_precision),
        (FLOAT32, _in_32_bits),
        (FLOAT32_RESULT, _to_32_bits),
        (FLOAT32_NORM, _norm_to_32_bits),
        (WIDEST, _in_the_widest),
        (REFUSED, _refused),
    ):
        kernels |= {name: kernel(found) for name in names if (found := _operator(name)) is not None}
    for name, kernel in kernels.items():
        library.impl(name, kernel, _KEY)
    for name in present - kernels.keys() - {*LOWER_PRECISION}:
        library.impl(name, torch.library.fallthrough_kernel, _KEY)


def _operator(name: str) -> torch_compat.OpOverload | None:
    """The operator of ATen called `name`; None if this version of torch has none."""
    packet, _, overload = name.partition(".")
    found: torch_compat.OpOverload | None = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return found


def _in_low_precision(operator: _Operator) -> _Kernel:
    return lambda *args, **kwargs: _below(
        operator, *_cast(args, torch.get_autocast_dtype("cpu")), **_cast(kwargs, torch.get_autocast_dtype("cpu"))
    )


def _in_32_bits(operator: _Operator) -> _Kernel:
    return lambda *args, **kwargs: _below(operator, *_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _to_32_bits(operator: _Operator) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _is_cast(args[0]) and kwargs.get("dtype") is None and not _names_a_dtype(args):
            kwargs["dtype"] = torch.float32
        return _below(operator, *args, **kwargs)

    return kernel


def _norm_to_32_bits(operator: torch_compat.OpOverload) -> _Kernel:
    wider = _operator(FLOAT32_NORM[operator._schema.name.removeprefix("aten::") + "." + operator._overloadname])
    assert wider is not None
    defaults = [each.default_value for each in operator._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not _is_cast(args[0]):
            return _below(operator, *args, **kwargs)
        return _below(wider, *args, *defaults[len(args) :], **kwargs, dtype=torch.float32)

    return kernel


def _in_the_widest(operator: _Operator) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = [each.dtype for each in tree_leaves((args, kwargs)) if _is_cast(each)]
        if not found:
            return _below(operator, *args, **kwargs)
        # Two kinds of 16 bits meet in 32.
        widest = found[0] if len({*found}) == 1 else torch.float32
        return _below(operator, *_cast(args, widest), **_cast(kwargs, widest))

    return kernel


def _refused(operator: _Operator) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise InvalidStateError(
            f"{operator} raises an error under autocast on CUDA: it is unsafe in low precision. Use "
            "binary_cross_entropy_with_logits, or nn.BCEWithLogitsLoss",
            kind="unsafe_autocast",
            name=str(operator),
        )

    return kernel


def _below(operator: _Operator, *args: Any, **kwargs: Any) -> Any:
    """Call an operator without autocast, which is also off for those that it is made of."""
    with torch_compat.ExcludeDispatchKeyGuard(torch_compat.DispatchKeySet(torch_compat.DispatchKey.AutocastCPU)):
        return operator(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if _is_cast(each) else each, value)


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _WIDTHS and value.device.type == "cpu"


def _names_a_dtype(args: tuple[Any, ...]) -> bool:
    return any(isinstance(each, torch.dtype) for each in args)


@contextmanager
def _for_cpu() -> Iterator[None]:
    """Inside, `torch.autocast("cuda")` in a model's own code is a region for the CPU, where its tensors are."""
    autocast: Any = torch.amp.autocast_mode.autocast
    begin = autocast.__init__

    @wraps(begin)  # TorchDynamo reads the signature
    def begin_for_cpu(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        begin(self, device_type, dtype, enabled, cache_enabled)

    autocast.__init__ = begin_for_cpu
    try:
        yield
    finally:
        autocast.__init__ = begin
