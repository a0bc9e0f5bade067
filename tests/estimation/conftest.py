"""Shared by tests of estimation: a residual block, a record of operators, and the folder of benchmarks."""

import sys
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpointable.steps import Residual
from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

WIDTH = 256


class Block(Residual):
    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        inside = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        super().__init__(nn.LayerNorm(width), *inside)


class Calls(TorchDispatchMode):
    """Every operator that runs, with what it was given and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.append((func, args, kwargs or {}, out))
        return out

    @property
    def names(self) -> list[str]:
        return [func._schema.name.removeprefix("aten::") for func, *_ in self.seen]
