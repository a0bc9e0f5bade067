"""What operators cost once Inductor has fused them: little to run again, in a kernel that reads their value anyway.

To keep a value costs more than before: one kernel writes it, and another one reads it.

Run one by one, an operator that is cheap to compute takes as long as its inputs and output take through memory. Fused,
its value stays in a register. So by the times of single operators, a partition would keep values that are faster to
make again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import torch
from torch import fx
from torch._functorch import partitioners
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes

from rotor_py.partition.costs.operator_costs import Cost, synchronize
from rotor_py.partition.joint_graph import JointGraph, known

_SHARE = 0.15
"""The part of its time that a fused operator takes. A guess: what it computes, without the way through memory."""
_REDUCED_SHARE = 0.5
"""The same for what reduces: its input is read once more."""
_SAMPLE_BYTES = 1 << 22
_RUNS = 5


def fused_costs(joint: JointGraph, costs: dict[fx.Node, Cost]) -> dict[fx.Node, Cost]:
    """The costs of nodes whose fusible operators share kernels; `costs` are those of operators run one by one."""
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
    """Whether a node's value is smaller than something that it reads: a sum, for example."""
    value = node.meta.get("val")
    read = [each.meta.get("val") for each in node.all_input_nodes]
    sizes = [each.numel() for each in read if isinstance(each, torch.Tensor)]
    return isinstance(value, torch.Tensor) and any(known(size) > known(value.numel()) for size in sizes)


@cache
def _seconds_per_byte(device: torch.device) -> float:
    """Seconds to write a byte into fresh memory, and to read it again."""
    with unset_fake_temporarily(), _disable_current_modes(), disable_proxy_modes_tracing(), torch.no_grad():
        source = torch.ones(_SAMPLE_BYTES // 4, device=device)

        def once() -> float:
            synchronize(device)
            began = time.perf_counter()
            source.clone().sum()
            synchronize(device)
            return time.perf_counter() - began

        once()
        return min(once() for _ in range(_RUNS)) / _SAMPLE_BYTES
