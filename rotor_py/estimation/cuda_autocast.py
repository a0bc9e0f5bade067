"""Make autocast treat CPU tensors as it treats CUDA tensors.

Under autocast on CUDA, softmax, norms, powers and sums return float32 tensors, which are saved for the backward; on the
CPU they keep the dtype of their arguments. Autocast has a kernel for each operator and device type. `cuda_autocast`
replaces the kernels of the CPU, for the whole process, except of operators that both devices cast to low precision:
these kernels also cache cast weights.

The lists below are those of `aten/src/ATen/autocast_mode.h` of torch 2.13: names of ATen operators with overloads.
Operators in no list run in the dtype of their arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch

from rotor_profiling import torch_compat
from rotor_profiling.isolate import set_meanwhile
from rotor_profiling.torch_compat import tree_leaves, tree_map_only
from rotor_py.errors import InvalidStateError
from rotor_solver.watching import holding


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Operators whose arguments are cast to the dtype of autocast.
LOWER_PRECISION = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
""")

# Operators whose arguments are cast to float32.
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

# Operators with an argument `dtype`, which autocast sets to float32 unless the caller sets it.
FLOAT32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")

# Norms without an argument `dtype`, and their overloads with one, which autocast calls with float32 instead.
FLOAT32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

# Operators whose arguments are cast to the widest of their dtypes.
WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")

REFUSED = ("binary_cross_entropy",)  # operators that raise an error under autocast: 16 bits may overflow


_KEY = "AutocastCPU"
_WIDTHS = (torch.float16, torch.bfloat16, torch.float32)  # dtypes that autocast casts; float64 stays
_inside: ContextVar[bool] = ContextVar("rotor_py.estimation.cuda_autocast", default=False)
_Call = Callable[..., Any]


def region(dtype: torch.dtype | None) -> Any:
    """Return a context of autocast for CPU tensors, which stand for CUDA tensors; for None, an empty context."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def cast_down(value: Any) -> Any:
    """Cast the tensors in the nested structure `value` to autocast's dtype; if autocast is off, return `value`."""
    return _cast(value, torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else value


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Within the context, autocast treats CPU tensors by CUDA's rules, and `torch.autocast("cuda")` applies to them."""
    if _inside.get():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of overridden kernels
            _replace_kernels(library)
        with holding(_inside, True), _for_cpu():
            yield
    finally:
        library._destroy()


def _replace_kernels(library: torch.library.Library) -> None:
    present = {name.removeprefix("aten::") for name in torch_compat.dispatch_get_registrations_for_dispatch_key(_KEY)}
    kernels: dict[str, _Call] = {}
    for names, kernel in (
        ([name for name in LOWER_PRECISION if name not in present], _in_low_precision),
        (FLOAT32, _in_32_bits),
        (FLOAT32_RESULT, _to_32_bits),
        (FLOAT32_NORM, _norm_to_32_bits),
        (WIDEST, _in_the_widest),
        (REFUSED, _refused),
    ):
        kernels |= {name: partial(kernel, found) for name in names if (found := _operator(name)) is not None}
    for name, kernel in kernels.items():
        library.impl(name, kernel, _KEY)
    for name in present - kernels.keys() - {*LOWER_PRECISION}:
        library.impl(name, torch.library.fallthrough_kernel, _KEY)


def _operator(name: str) -> torch_compat.OpOverload | None:
    packet, _, overload = name.partition(".")
    found: torch_compat.OpOverload | None = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return found


def _in_low_precision(operator: _Call, *args: Any, **kwargs: Any) -> Any:
    return _below(operator, *cast_down(args), **cast_down(kwargs))


def _in_32_bits(operator: _Call, *args: Any, **kwargs: Any) -> Any:
    return _below(operator, *_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _to_32_bits(operator: _Call, *args: Any, **kwargs: Any) -> Any:
    given = kwargs.get("dtype") is not None or any(isinstance(each, torch.dtype) for each in args)
    if _is_cast(args[0]) and not given:
        kwargs["dtype"] = torch.float32
    return _below(operator, *args, **kwargs)


def _norm_to_32_bits(operator: torch_compat.OpOverload, *args: Any, **kwargs: Any) -> Any:
    if not _is_cast(args[0]):
        return _below(operator, *args, **kwargs)
    wider = _operator(FLOAT32_NORM[operator._schema.name.removeprefix("aten::") + "." + operator._overloadname])
    assert wider is not None
    defaults = [each.default_value for each in operator._schema.arguments]
    return _below(wider, *args, *defaults[len(args) :], **kwargs, dtype=torch.float32)


def _in_the_widest(operator: _Call, *args: Any, **kwargs: Any) -> Any:
    found = [each.dtype for each in tree_leaves((args, kwargs)) if _is_cast(each)]
    if not found:
        return _below(operator, *args, **kwargs)
    # float16 and bfloat16 together promote to float32.
    widest = found[0] if len({*found}) == 1 else torch.float32
    return _below(operator, *_cast(args, widest), **_cast(kwargs, widest))


def _refused(operator: _Call, *_args: Any, **_kwargs: Any) -> Any:
    message = f"{operator} is unsafe under autocast: use binary_cross_entropy_with_logits, or nn.BCEWithLogitsLoss"
    raise InvalidStateError(message, kind="unsafe_autocast", name=str(operator))


def _below(operator: _Call, *args: Any, **kwargs: Any) -> Any:
    """Call `operator` with autocast off, also for the operators that it calls."""
    with torch_compat.ExcludeDispatchKeyGuard(torch_compat.DispatchKeySet(torch_compat.DispatchKey.AutocastCPU)):
        return operator(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if _is_cast(each) else each, value)


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _WIDTHS and value.device.type == "cpu"


@contextmanager
def _for_cpu() -> Iterator[None]:
    """Within the context, `torch.autocast("cuda")` in user code acts on the CPU, where simulated tensors are."""
    autocast: Any = torch.amp.autocast_mode.autocast
    begin = autocast.__init__

    @wraps(begin)  # TorchDynamo reads the original signature
    def begin_for_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        begin(self, device_type, dtype, *args, **kwargs)

    with set_meanwhile((autocast, {"__init__": begin_for_cpu})):
        yield
