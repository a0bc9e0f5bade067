"""What it takes to make the values of a captured stage again, and which may be made again at all.

Prices are in floating point operations: those that an operator takes, and for every byte that it writes as many as
could be done in the meantime. They only have to say which of two values is dearer for its bytes; seconds are measured
later, of whole stages.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from rotor_profiling.storage import layout_of
from rotor_py.capture.graph.graph_nodes import is_random, tensors_of
from rotor_py.capture.graph.sizes import Sizes

_FOR_A_BYTE = 20
"""Between a processor's core, with about 5, and a GPU in half precision, with about 300. A guess."""
_FOR_A_FUNCTION = 50
"""For each number of which exp, tanh or the like is computed: half a nanosecond of a processor's core. A guess."""
_FOR_ATTENTION = 2
"""How much longer attention takes than a product of as many operations. A guess: 1.8 on a core with AVX-512."""
# fmt: off
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_", "relu_", "clamp_")
_OPERATORS = (
    "add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide", "truediv", "neg", "negative", "pow",
    "square", "sqrt", "rsqrt", "reciprocal", "abs", "exp", "expm1", "log", "log1p", "log2", "erf", "tanh", "sigmoid",
    "sin", "cos", "where", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "mean", "sum", "var", "amax",
    "softmax", "log_softmax", "cat", "concat", "stack", "reshape", "flatten", "repeat", "repeat_interleave", "relu",
    "rms_norm", "layer_norm", "group_norm", "clone", "contiguous", "softplus", "celu", "selu", "masked_fill", "to",
    "type_as", "float", "half", "bfloat16", *_IN_PLACE,
)
_LAYERS = (
    "silu", "gelu", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "softplus", "mish", "hardswish",
    "hardsigmoid", "hardtanh", "tanh", "sigmoid", "logsigmoid", "softsign", "softmax", "log_softmax", "layer_norm",
    "rms_norm", "group_norm", "glu", "normalize",
)
_SIMPLE = (
    "add", "sub", "rsub", "mul", "multiply", "neg", "negative", "square", "abs", "where", "clamp", "clamp_min",
    "clamp_max", "maximum", "minimum", "cat", "concat", "stack", "reshape", "flatten", "repeat", "repeat_interleave",
    "relu", "clone", "contiguous", "masked_fill", "to", "type_as", "float", "half", "bfloat16", "div", "divide",
    "true_divide", "truediv", *_IN_PLACE,
)
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")
_CONVOLUTIONS = tuple(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
_ATTENTION = ("scaled_dot_product_attention",)
# fmt: on


def _named(names: tuple[str, ...], *modules: Any) -> set[Any]:
    """The functions of these names, and the names of the methods."""
    return {*(getattr(module, name) for name in names for module in modules if hasattr(module, name)), *names}


CHEAP: set[Any] = _named(_OPERATORS, torch, operator) | _named(_LAYERS, F, torch._C._nn) - set(_LAYERS)
"""Operators that take no longer than reading and writing their tensors, as functions and as names of methods. Matrix
products, convolutions and attention take longer. Random operators would have to draw again from the same state.
"""
_KINDS: dict[str, set[Any]] = {
    "attention": _named(_ATTENTION, F, torch._C._nn),
    "convolutions": _named(_CONVOLUTIONS, torch, F),
    "products": _named(_PRODUCTS, torch, operator, F, torch._C._nn),
}
"""Operators that take longer and make the same bits from the same tensors."""


def is_cheap(node: fx.Node) -> bool:
    """Whether a node that allocates memory can be run again in little time."""
    return node.op in ("call_function", "call_method") and node.target in CHEAP and _makes_one(node)


def kind_of(node: fx.Node) -> str | None:
    """Of a node that can be run again, and takes longer: what it is."""
    if node.op not in ("call_function", "call_method") or not _makes_one(node) or is_random(node):
        return None
    found = next((kind for kind, operators in _KINDS.items() if node.target in operators), None)
    return None if found == "attention" and _drops_out(node) else found


def _makes_one(node: fx.Node) -> bool:
    tensors = tensors_of(node)
    # Of a DTensor, an operator may send something.
    return len(tensors) == 1 and tensors[0].is_floating_point() and layout_of(tensors[0]) is None


def _drops_out(node: fx.Node) -> bool:
    # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, …)
    return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0) != 0.0)


_ARITHMETIC: set[Any] = _named(_SIMPLE, torch, operator, F)


def price_of(node: fx.Node, flops: int, sizes: Sizes) -> int:
    """What it takes to run a node again that takes so many floating point operations; see above."""
    written = max(map(sizes.bytes_of, tensors_of(node)), default=0)
    read = sum(max(map(sizes.bytes_of, tensors_of(each)), default=0) for each in node.all_input_nodes)
    found = flops * (_FOR_ATTENTION if kind_of(node) == "attention" else 1) + _FOR_A_BYTE * (read + written)
    if kind_of(node) is None and node.target not in _ARITHMETIC:
        found += _FOR_A_FUNCTION * (written // max(1, tensors_of(node)[0].element_size()))
    return found


class FlopCount(TorchDispatchMode):
    """Counts the floating point operations of what runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **(kwargs or {}), out_val=made))
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.total += int(sdpa_flop_count(*(each.shape for each in args[:3])))
        return made
