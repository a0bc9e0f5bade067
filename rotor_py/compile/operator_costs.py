"""Measure the time and scratch memory of each operator of a graph, and estimate the costs of fused operators."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from rotor_profiling import torch_compat
from rotor_profiling.backends import memory_meter
from rotor_profiling.torch_compat import (
    disable_current_modes,
    partitioners,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)
from rotor_py.compile.joint_graph import JointGraph, is_number, known
from rotor_py.errors import record_fields

# On the CPU, Inductor converts images and weights of convolutions to channels-last, for which it copies inputs. This
# also changes oneDNN's scratch memory: to 0.1 to 3 times as much, as measured for the layers of a U-Net.

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # the channels-last layout by number of dimensions


def laid_out(node: fx.Node) -> int:
    """Return how many arguments Inductor converts to channels-last: 2 of a CPU convolution, 3 of its backward, or 0."""
    value = node.all_input_nodes[0].meta.get("val") if node.target in (_FORWARD, _BACKWARD) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return 0
    return 2 if node.target is _FORWARD else 3


def copied_bytes(node: fx.Node, last: int) -> int:
    """Return the bytes that Inductor copies to convert the first `last` arguments of a node to channels-last."""
    if not last:
        return 0
    wanted: Any = node.args[-1]  # of a backward: whether to compute the gradients of image, weight and bias
    # The backward reads the weight only to compute the gradient of the image.
    read = node.args[: last - 1 if node.target is _BACKWARD and not wanted[0] else last]
    copied = 0
    for value in read:
        # Only inputs of the graph are copied: Inductor's code allocates all other values in this layout.
        if isinstance(value, fx.Node) and value.op == "placeholder":
            tensor = value.meta["val"]
            layout = _LAST.get(tensor.dim())
            if layout is not None and not tensor.is_contiguous(memory_format=layout):
                copied += known(tensor.numel()) * tensor.element_size()
    return copied


# Each operator is run by itself on tensors of its arguments' sizes, once for all nodes with an equal `_kind`. Its time
# decides which values to recompute. Its scratch memory, which the graph does not show, adds to the peak.


_log = logging.getLogger("rotor_py")

# Bytes per second assumed for operators that cannot be timed. A guess: if too low, values are kept unnecessarily.
_BYTES_PER_SECOND = 1e10
# Number of timed runs of an operator. The fastest counts, as other programs only slow runs. A guess: more take longer.
_RUNS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one run of an operator."""

    seconds: float = 0.0
    scratch: int = 0  # peak bytes while it runs, beyond its inputs and outputs
    keeping: float = 0.0  # if fused, seconds to write the result to memory in the forward and read it in the backward


# Maps each `_kind` to its costs, measured only once in a process, so that equal budgets lead to equal partitions.
_known: dict[Hashable, Cost] = {}


# Maps each `_kind` to a function that makes arguments, and returns a function that calls the operator with them.
_Runs = dict[Hashable, Callable[[], Callable[[], Any]]]


def operator_costs(joint: JointGraph, *, inductor: bool = False) -> dict[fx.Node, Cost]:
    """Return the cost of every node. `inductor`: measure CPU convolutions in the layouts that Inductor chooses."""
    found: dict[fx.Node, Cost] = {}
    kinds: dict[fx.Node, Hashable] = {}
    copied: dict[fx.Node, int] = {}
    missing: dict[Hashable, tuple[fx.Node, int]] = {}
    for node in (*joint.forward, *joint.backward):
        if node.target is operator.getitem or is_number(node) or _is_view(joint, node):
            found[node] = Cost()
            continue
        last = laid_out(node) if inductor else 0
        copied[node] = copied_bytes(node, last)
        kinds[node] = _kind(node), last
        if kinds[node] not in _known:
            missing.setdefault(kinds[node], (node, last))
    _measure(joint, missing)
    for node, kind in kinds.items():
        found[node] = replace(_known[kind], scratch=_known[kind].scratch + copied[node])
    return found


def _is_view(joint: JointGraph, node: fx.Node) -> bool:
    mine = joint.allocations[node].keys()
    return bool(mine) and all(any(each in joint.allocations[read] for read in node.all_input_nodes) for each in mine)


def _kind(node: fx.Node) -> Hashable:
    def described(value: Any) -> Any:
        value = value.meta.get("val") if isinstance(value, fx.Node) else value
        if isinstance(value, torch.Tensor):
            sizes, strides = map(known, value.shape), map(known, value.stride())
            return tuple(sizes), tuple(strides), value.dtype, str(value.device)
        return known(value) if isinstance(value, torch.SymInt) else str(value)

    arguments = tuple(map(str, tree_leaves(fx.node.map_arg((node.args, node.kwargs), described))))
    return str(node.target), arguments


def _measure(joint: JointGraph, missing: dict[Hashable, tuple[fx.Node, int]]) -> None:
    device = joint.device
    with ExitStack() as stack:
        # The compiler calls this in modes that make tensors fake, or trace operators: leave these modes.
        for mode in (unset_fake_temporarily, disable_current_modes, disable_proxy_modes_tracing, torch.no_grad):
            stack.enter_context(mode())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        runs: _Runs = {
            kind: partial(_prepared, node, last)
            for kind, (node, last) in missing.items()
            # Operators of other namespaces may have effects, such as communication: do not run them.
            if isinstance(node.target, torch_compat.OpOverload) and node.target.namespace in ("aten", "prims")
        }
        seconds, scratch = _seconds(runs, device), _scratch(runs, device)
        for kind, (node, _) in missing.items():
            if kind in seconds and kind in scratch:
                _known[kind] = Cost(seconds[kind], scratch[kind])
            else:
                _known[kind] = Cost(sum(map(joint.bytes_of, {node, *node.all_input_nodes})) / _BYTES_PER_SECOND)


def _prepared(node: fx.Node, last: int) -> Callable[[], Any]:
    def made(value: Any) -> Any:
        value = value.meta.get("val") if isinstance(value, fx.Node) else value
        if isinstance(value, torch.Tensor):
            like = torch.empty_strided(
                tuple(map(known, value.shape)),
                tuple(map(known, value.stride())),
                dtype=value.dtype,
                device=value.device,
            )
            # Fill floating-point tensors with 0.5, and other tensors with 0, which is a valid index.
            return like.fill_(0.5) if like.is_floating_point() else like.zero_()
        return known(value) if isinstance(value, torch.SymInt) else value

    args, kwargs = tree_map(made, (node.args, node.kwargs), is_leaf=lambda each: isinstance(each, fx.Node))
    first = [each.to(memory_format=_LAST.get(each.dim(), torch.preserve_format)) for each in args[:last]]
    target: Any = node.target
    return partial(target, *first, *args[last:], **kwargs)


def _seconds(runs: _Runs, device: torch.device) -> dict[Hashable, float]:
    found = {}
    for kind, prepared in runs.items():
        try:
            run = prepared()
            run()
            found[kind] = min(_timed(run, device) for _ in range(_RUNS))
        except Exception as error:  # an operator may reject these values, or run out of memory
            _log.debug("operator %s cannot be timed alone: %s", kind, error, extra=record_fields("not_measured"))
    return found


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


def _scratch(runs: _Runs, device: torch.device) -> dict[Hashable, int]:
    meter = memory_meter(device)
    numbers: dict[str, Hashable] = {}
    try:
        with meter:
            for number, (kind, prepared) in enumerate(runs.items()):
                try:
                    run = prepared()
                    meter.mark(str(number))
                    result = run()
                    meter.mark("")
                except Exception as error:
                    _log.debug("operator %s cannot run alone: %s", kind, error, extra=record_fields("not_measured"))
                    continue
                numbers[str(number)] = kind
                del run, result
    except RuntimeError as error:  # another profiler is active
        _log.debug("cannot measure operators' scratch memory: %s", error, extra=record_fields("not_measured"))
    phases = meter.phases
    return {kind: max(0, phases[name].rise - phases[name].kept) for name, kind in numbers.items() if name in phases}


# A cheap operator spends most of its time on reading and writing memory. When Inductor fuses it with others, its value
# stays in a register. To recompute the value in a kernel of the backward is then faster than to keep it in memory.


# Seconds of a fused operator, as a share of its seconds when it is not fused. A guess: if too high, partitions keep
# values that are faster to recompute; if too low, they recompute values that are faster to keep.
_SHARE = 0.15
_REDUCED_SHARE = 0.5  # the share for a fused reduction: larger, as it reads its input from memory. A guess, too
_SAMPLE_BYTES = 1 << 22
_FUSED_RUNS = 5


def fused_costs(joint: JointGraph, costs: dict[fx.Node, Cost]) -> dict[fx.Node, Cost]:
    """Return `costs` with estimates for the operators that Inductor fuses, in place of what was measured unfused."""
    kinds = partitioners.get_default_op_list()
    found = {}
    for node, cost in costs.items():
        if not kinds.is_fusible(node):
            found[node] = cost
            continue
        share = _REDUCED_SHARE if reduces(node) else _SHARE
        device = node.meta["val"].device if isinstance(node.meta.get("val"), torch.Tensor) else torch.device("cpu")
        keeping = joint.bytes_of(node) * _seconds_per_byte(device) if joint.root.get(node) is node else 0.0
        found[node] = replace(cost, seconds=share * cost.seconds, keeping=keeping)
    return found


def reduces(node: fx.Node) -> bool:
    """Whether a node returns a tensor with fewer elements than an input tensor has, as a sum does."""
    value = node.meta.get("val")
    read = [each.meta.get("val") for each in node.all_input_nodes]
    sizes = [each.numel() for each in read if isinstance(each, torch.Tensor)]
    return isinstance(value, torch.Tensor) and any(known(size) > known(value.numel()) for size in sizes)


@cache
def _seconds_per_byte(device: torch.device) -> float:
    """Return the measured seconds, per byte, to allocate and write memory and then to read it."""
    with unset_fake_temporarily(), disable_current_modes(), disable_proxy_modes_tracing(), torch.no_grad():
        source = torch.ones(_SAMPLE_BYTES // 4, device=device)
        return min(_timed(lambda: source.clone().sum(), device) for _ in range(_FUSED_RUNS)) / _SAMPLE_BYTES
