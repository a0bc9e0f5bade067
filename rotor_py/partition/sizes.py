"""Symbolic sizes. A partition serves all sizes up to those that it was made for; a larger one is compiled for anew."""

from __future__ import annotations

import logging

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols

from rotor_profiling.storage import tensors_in
from rotor_py.errors import record_fields
from rotor_py.partition.joint_graph import UNKNOWN_SIZE, known

_log = logging.getLogger("rotor_py")


def guard_sizes(inputs: list[fx.Node]) -> None:
    """Have TorchDynamo compile again where a size is larger than now: memory grows with every size.

    Sizes that depend on data have no bound. What stands for them is said in a warning.
    """
    for node in inputs:
        value = node.meta.get("val")
        sizes = [value] if isinstance(value, torch.SymInt) else [s for each in tensors_in(value) for s in each.shape]
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            environment: ShapeEnv = size.node.shape_env
            if any(map(environment.is_unbacked_symint, free_symbols(size))):
                _log.warning(
                    "a graph's sizes depend on data (%s); its memory budget is kept for a size of %d",
                    size.node.expr,
                    UNKNOWN_SIZE,
                    extra=record_fields("size_depends_on_data", name=str(size.node.expr), assumed=UNKNOWN_SIZE),
                )
            elif isinstance(size.node.expr, sympy.Symbol):
                bool(size <= known(size))  # a guard: Dynamo checks it before it uses what is compiled here
