"""Run a graph to find the values that autograd saves: on a measured stage's real input, or on fake tensors."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from rotor_profiling import torch_compat
from rotor_profiling.storage import layout_of, local, tensors_in
from rotor_profiling.torch_compat import FakeTensor, FakeTensorMode
from rotor_py.capture.fsdp_markers import is_mark, passed_through
from rotor_py.capture.graph.graph_nodes import (
    GATHERED,
    SymbolValues,
    example_of,
    is_random,
    overwrites,
    owned_by,
    tensors_of,
)
from rotor_py.capture.graph.stage_graph import graph_on
from rotor_py.errors import InvalidTypeError
from rotor_py.stage.partial_storage import Call, Recipe, Value
from rotor_solver.max_flow import reached

# The price of recomputing a value is a number of floating point operations: its operator's own, and `_FOR_A_BYTE` for
# each byte that the operator reads or writes. Prices serve to choose storage modes only, which are then timed.

# Number of operations that take as long as reading or writing one byte. A guess between a CPU core's 5 and a GPU's 300.
_FOR_A_BYTE = 20
# Number of operations that take as long as one exp, tanh or the like. A guess: half a nanosecond of a CPU core.
_FOR_A_FUNCTION = 50
# Time of attention, relative to a matrix product of as many operations. A guess: 1.8 on a core with AVX-512.
_FOR_ATTENTION = 2
# fmt: off
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_", "relu_", "clamp_")
_SIMPLE = (
    "add", "sub", "rsub", "mul", "multiply", "neg", "negative", "square", "abs", "where", "clamp", "clamp_min",
    "clamp_max", "maximum", "minimum", "cat", "concat", "stack", "reshape", "flatten", "repeat", "repeat_interleave",
    "relu", "clone", "contiguous", "masked_fill", "to", "type_as", "float", "half", "bfloat16", "div", "divide",
    "true_divide", "truediv", *_IN_PLACE,
)
_OPERATORS = (
    *_SIMPLE, "pow", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "erf", "tanh", "sigmoid",
    "sin", "cos", "mean", "sum", "var", "amax", "softmax", "log_softmax", "rms_norm", "layer_norm", "group_norm",
    "softplus", "celu", "selu",
)
_LAYERS = (
    "silu", "gelu", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "softplus", "mish", "hardswish",
    "hardsigmoid", "hardtanh", "tanh", "sigmoid", "logsigmoid", "softsign", "softmax", "log_softmax", "layer_norm",
    "rms_norm", "group_norm", "glu", "normalize",
)
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")
_CONVOLUTIONS = tuple(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
_ATTENTION = ("scaled_dot_product_attention",)
# fmt: on


def named(names: Sequence[str], *modules: Any) -> set[Any]:
    """Return the functions of these names in `modules`, and the names: nodes that call methods have them as targets."""
    return {*(getattr(module, name) for name in names for module in modules if hasattr(module, name)), *names}


# Operators, none of them random, that take about as long as reading and writing their tensors.
CHEAP: set[Any] = named(_OPERATORS, torch, operator) | named(_LAYERS, F, torch_compat.c_nn) - set(_LAYERS)
# Slower operators, by sort. They compute the same bits from the same tensors in every run.
KINDS: dict[str, set[Any]] = {
    "attention": named(_ATTENTION, F, torch_compat.c_nn),
    "convolutions": named(_CONVOLUTIONS, torch, F),
    "products": named(_PRODUCTS, torch, operator, F, torch_compat.c_nn),
}


def is_cheap(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and node.target in CHEAP and _makes_one(node)


def kind_of(node: fx.Node) -> str | None:
    """Return the key of KINDS for a slow operator that can be recomputed; None for other operators."""
    if node.op not in ("call_function", "call_method") or not _makes_one(node) or is_random(node):
        return None
    found = next((kind for kind, operators in KINDS.items() if node.target in operators), None)
    # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, …)
    dropout = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    return None if found == "attention" and dropout != 0.0 else found


def _makes_one(node: fx.Node) -> bool:
    tensors = tensors_of(node)
    # Do not recompute operators on DTensors, which may communicate.
    return len(tensors) == 1 and tensors[0].is_floating_point() and layout_of(tensors[0]) is None


_ARITHMETIC: set[Any] = named(_SIMPLE, torch, operator, F)


def price_of(node: fx.Node, flops: int, sizes: SymbolValues) -> int:
    written = largest_bytes(node, sizes)
    read = sum(largest_bytes(each, sizes) for each in node.all_input_nodes)
    found = flops * (_FOR_ATTENTION if kind_of(node) == "attention" else 1) + _FOR_A_BYTE * (read + written)
    if kind_of(node) is None and node.target not in _ARITHMETIC:
        found += _FOR_A_FUNCTION * (written // max(1, tensors_of(node)[0].element_size()))
    return found


def largest_bytes(node: fx.Node, sizes: SymbolValues) -> int:
    return max(map(sizes.bytes_of, tensors_of(node)), default=0)


# torch's counter does not count the operations of the CPU's attention kernel. Count them as for other kernels.
_CPU_ATTENTION = torch_compat.scaled_dot_product_flash_attention_for_cpu
_MORE_FLOPS = {_CPU_ATTENTION: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)}


@dataclass(frozen=True, slots=True)
class SavedValues:
    """What a run of a graph with autograd shows about its nodes.

    `saved`: nodes whose memory autograd saves. `roots`: maps each node with a tensor to the node that allocated the
    tensor's memory, or wrote into it last. `in_graph`: nodes with a tensor that requires a gradient. `flops`: numbers
    of operations of nodes with a `kind_of`. `overwritten`: nodes whose value a later node overwrites, so it cannot be
    kept. `stale`: nodes that read a view made before a write into its memory, so they cannot be recomputed.
    """

    saved: set[fx.Node] = field(default_factory=set)
    roots: dict[fx.Node, fx.Node] = field(default_factory=dict)
    in_graph: set[fx.Node] = field(default_factory=set)
    flops: dict[fx.Node, int] = field(default_factory=dict)
    overwritten: set[fx.Node] = field(default_factory=set)
    stale: set[fx.Node] = field(default_factory=set)


def find_saved_values(body: fx.GraphModule, sizes: SymbolValues, arguments: Sequence[Any] | None = None) -> SavedValues:
    """Run `body` on `arguments` or fake tensors to find what autograd saves. Raises TypeError if that is impossible."""
    found = SavedValues()
    memories = _Memories(found)
    values: dict[fx.Node, Any] = {}
    readers = Counter({node: len(node.users) for node in body.graph.nodes})
    mode = FakeTensorMode(allow_non_fake_inputs=True) if arguments is None else None
    given = iter(arguments or ())
    hooks = torch.autograd.graph.saved_tensors_hooks(memories.save, lambda tensor: tensor)
    with mode or nullcontext(), torch.enable_grad(), hooks:
        for node in body.graph.nodes:
            if node.op == "output":
                break
            read = {each: tensors_in(values[each]) for each in node.all_input_nodes}
            before = [(tensor, tensor._version) for tensors in read.values() for tensor in tensors]
            with _counter() if kind_of(node) else nullcontext() as count:
                values[node] = _value_of(body, node, values, given, mode, sizes)
            if count is not None:
                found.flops[node] = count.get_total_flops()
            written = [tensor for tensor, version in before if tensor._version != version]
            if not written and node.op.startswith("call") and overwrites(node):
                name = str(node.target)
                raise InvalidTypeError(f"{name} changes a tensor's metadata", kind="metadata_changed", name=name)
            memories.read(node, read)
            memories.write(node, written)
            memories.make(node, tensors_in(values[node]))
            del read, before, written
            # Free each value after the last node that reads it, as in training.
            readers.subtract(node.all_input_nodes)
            for each in (node, *node.all_input_nodes):
                if not readers[each]:
                    values.pop(each, None)
    memories.end()
    return found


class _NoModules(nullcontext[None]):
    parents = ("Global",)


def _counter() -> Any:
    counter: Any = FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS)
    # The counter's own tracker would register hooks on all modules of the process, also on those of other threads.
    counter.mod_tracker = _NoModules()
    return counter


@dataclass
class _Memories:
    """Follow the storages ("memories") of a graph's values while it runs, and record in `found` what is learnt."""

    found: SavedValues
    made_by: dict[int, fx.Node] = field(default_factory=dict)  # maps storages to the nodes that wrote into them last
    # For each node, maps storages of its tensors to their last writer when this node, or the one that it views, ran.
    seen: dict[fx.Node, dict[int, fx.Node]] = field(default_factory=dict)
    # Storages of all tensors that autograd saved, also of an operator's internal tensors, which no node returns.
    saved: set[int] = field(default_factory=set)
    # Maps storages' addresses to weak references, which keep new storages from getting the same addresses.
    known: dict[int, StorageWeakRef] = field(default_factory=dict)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.add(self._number(tensor))
        return tensor.detach()  # else, an autograd node that saves its own result would be in a cycle, never freed

    def _number(self, tensor: torch.Tensor) -> int:
        storage = local(tensor).untyped_storage()
        number = int(storage._cdata)
        if number not in self.known:
            self.known[number] = StorageWeakRef(storage)
        return number

    def read(self, node: fx.Node, inputs: Mapping[fx.Node, list[torch.Tensor]]) -> None:
        for each, tensors in inputs.items():
            if any(self.seen[each][memory] is not self.made_by[memory] for memory in map(self._number, tensors)):
                self.found.stale.add(node)

    def write(self, node: fx.Node, tensors: Iterable[torch.Tensor]) -> None:
        for memory in {*map(self._number, tensors)}:
            self.found.overwritten.add(self.made_by[memory])
            self.made_by[memory] = node

    def make(self, node: fx.Node, tensors: Iterable[torch.Tensor]) -> None:
        seen = self.seen[node] = {}
        for tensor in tensors:
            if tensor.requires_grad:
                self.found.in_graph.add(node)
            memory = self._number(tensor)
            made_by = self.made_by.setdefault(memory, node)
            if made_by is not node:  # a view, or the result of an in-place operator: as old as the input that it views
                before = [self.seen[each].get(memory, made_by) for each in node.all_input_nodes]
                made_by = next((each for each in before if each is not made_by), made_by)
            seen[memory] = self.found.roots[node] = made_by

    def end(self) -> None:
        """Record as saved the nodes that wrote into saved storages last: autograd rejects writes after the saving."""
        made_by = {self.made_by[memory] for memory in self.saved if memory in self.made_by}
        # Leave out operators that write but return no tensor, such as `setitem`: there is no value to keep or drop.
        self.found.saved.update(node for node in made_by if self.found.roots.get(node) is node)


def _value_of(
    body: fx.GraphModule,
    node: fx.Node,
    values: dict[fx.Node, Any],
    given: Iterator[Any],
    mode: FakeTensorMode | None,
    sizes: SymbolValues,
) -> Any:
    """Run a node and return its value. A placeholder's value is the next of `given`, or fake tensors under a `mode`."""
    if node.op not in ("placeholder", "get_attr"):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if is_mark(node):
            return args[1:]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]  # a function
    if mode is not None and (node.op == "placeholder" or GATHERED in node.meta):
        return fx.node.map_aggregate(example_of(node), lambda each: _like(each, sizes))
    found = next(given) if node.op == "placeholder" else owned_by(body, node)
    for tensor in tensors_in(found):
        _refuse_special(tensor)
    return mode.from_tensor(found) if mode is not None and isinstance(found, torch.Tensor) else found


def _like(value: Any, sizes: SymbolValues) -> Any:
    """Return a tensor like a fake one of TorchDynamo's, or a number like a symbolic one, with values for symbols."""
    if isinstance(value, DTensor):
        part = _like(value._local_tensor, sizes).requires_grad_(value.requires_grad)
        shape, strides = torch.Size(map(sizes.number, value.shape)), tuple(map(sizes.number, value.stride()))
        return DTensor.from_local(
            part, value.device_mesh, value.placements, run_check=False, shape=shape, stride=strides
        )
    if isinstance(value, torch.Tensor):
        _refuse_special(value)
        size, stride = list(map(sizes.number, value.shape)), list(map(sizes.number, value.stride()))
        like = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        return like.requires_grad_(value.requires_grad)
    return sizes.number(value)


def _refuse_special(tensor: torch.Tensor) -> None:
    """Raise TypeError for tensor subclasses and layouts other than strided, which may have no storage of their own."""
    kind, layout = type(local(tensor)), local(tensor).layout
    if kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor) or layout is not torch.strided:
        name = kind.__name__
        raise InvalidTypeError(f"{name} of layout {layout}", kind="unknown_layout", name=name)


@dataclass(frozen=True, slots=True)
class SavedPart:
    """Indices of nodes whose values a stage keeps, and of those it drops; and the recipe to recompute the latter."""

    kept: frozenset[int]
    dropped: frozenset[int]
    recipe: Recipe

    @classmethod
    def of_cut(cls, body: fx.GraphModule, values: SavedValues, kept: Set[fx.Node]) -> SavedPart:
        numbers = {node: number for number, node in enumerate(body.graph.nodes)}
        dropped = values.saved - kept

        def stays(node: fx.Node) -> bool:
            # Also keep sizes, and inputs in the memory of another input: this costs nothing.
            return node in kept or node not in values.roots or not node.op.startswith("call")

        behind = reached(dropped, lambda node: () if stays(node) else node.all_input_nodes)
        found = {numbers[node] for node in behind if stays(node)}
        calls = {numbers[node]: _call(node, numbers, values) for node in behind if not stays(node)}
        places = frozenset(numbers[node] for node in dropped)
        needs = {number: _needs(calls, found, number) for number in places}
        return cls(frozenset(found), places, Recipe(calls, needs))

    def instrumented(self, body: fx.GraphModule, stage: fx.Graph) -> fx.GraphModule:
        """Copy the graph `stage`. The copy tells a PartialSaving, its new first input, each value to keep or drop."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        saving = graph.placeholder("saving")
        graph.output(graph.graph_copy(stage, copies))
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for number, node in enumerate(stage.nodes):
            if number in self.kept or number in self.dropped:
                with graph.inserting_after(last if node.op == "placeholder" else copies[node]):
                    graph.call_method("drop" if number in self.dropped else "keep", (saving, number, copies[node]))
        return graph_on(body, graph, "PartialGraphStage")


def _call(node: fx.Node, numbers: dict[fx.Node, int], values: SavedValues) -> Call:
    values_in: Any = {each: Value(number) for each, number in numbers.items()}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values_in.__getitem__)
    function: Any = partial(_call_method, node.target) if isinstance(node.target, str) else node.target
    if is_mark(node):  # do not call FSDP's hooks when values are recomputed: they would count another forward
        function = passed_through
    # Recompute slow operators on inputs with the same `requires_grad` as before: PyTorch may choose kernels by it.
    whole = values.roots.get(node) is node and not is_cheap(node)
    wanted = frozenset(numbers[each] for each in node.all_input_nodes if each in values.in_graph) if whole else None
    return Call(function, args, kwargs, tuple(numbers[each] for each in node.all_input_nodes), wanted)


def _call_method(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return getattr(tensor, name)(*args, **kwargs)


def _needs(calls: dict[int, Call], kept: set[int], number: int) -> frozenset[int]:
    behind: dict[int, None] = reached([number], lambda each: () if each in kept else calls[each].reads)
    return frozenset(kept.intersection(behind))
