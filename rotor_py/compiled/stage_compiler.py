"""Compiling stages: those of one kind once, in this process by a table and in the next one by Inductor's cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from rotor_profiling.stage.kind import stage_kind
from rotor_py.compiled.stage_code import Config, StageCode, compile_code, owned_slots
from rotor_py.errors import InfeasibleError
from rotor_py.stage.autocast import autocast_now
from rotor_py.stage.protocol import offers_of

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

_log = logging.getLogger("rotor_py")

_DEVICES = (torch.device("cpu"), torch.device("cuda"))
"""Those whose autocast a stage may depend on."""


class StageCompiler:
    """Compiles the stages of one model with these options of Inductor."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._codes: dict[Hashable, StageCode | None] = {}
        self.seconds = 0.0
        """How long compiling has taken so far."""

    @property
    def kinds(self) -> int:
        """How many kinds of stages have been compiled."""
        return sum(code is not None for code in self._codes.values())

    def code(
        self,
        stage: nn.Module,
        name: str,
        value: object,
        needs_gradient: Sequence[bool],
        partitioner: CustomPartitionerFn | None = None,
    ) -> StageCode | None:
        """The code for `stage` on inputs like `value`; `needs_gradient` says so of every tensor in it.

        None, after one line in the log, if stages of its kind cannot be compiled. InfeasibleError if the partitioner
        finds nothing that fits.
        """
        leaves, spec = tree_flatten(value)
        flags = iter(needs_gradient)
        like = [
            leaf.detach().requires_grad_(next(flags)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        kind = _kind(stage, tree_unflatten(like, spec)), partitioner
        if kind not in self._codes:
            self._codes[kind] = self._compile(stage, name, value, needs_gradient, partitioner)
        return self._codes[kind]

    def _compile(
        self,
        stage: nn.Module,
        name: str,
        value: object,
        needs_gradient: Sequence[bool],
        partitioner: CustomPartitionerFn | None,
    ) -> StageCode | None:
        began = time.perf_counter()
        try:
            return compile_code(stage, value, needs_gradient, self._config, partitioner)
        except InfeasibleError:
            raise
        # Whatever AOTAutograd, Inductor or the compiler of the machine raise: plain, the stage trains as well.
        except Exception as error:
            cause = str(error).strip().partition("\n")[0] or type(error).__name__
            _log.warning("%s is not compiled: %s", name, cause)
            return None
        finally:
            self.seconds += time.perf_counter() - began


def _kind(stage: nn.Module, value: object) -> Hashable:
    """A key that is equal for stages that the same code serves."""
    numbers: dict[int, int] = {}
    shared = tuple(numbers.setdefault(id(tensor), len(numbers)) for _, _, tensor in owned_slots(stage))
    # What a graph calls that is a module, the kind of a stage does not say. A bare module is called by nobody: it holds
    # the parameters of a module of `fully_shard`.
    graphs = [module for module in stage.modules() if isinstance(module, fx.GraphModule)]
    calls = any(type(child) is not nn.Module for graph in graphs for child in graph.children())
    autocast = tuple((each.device_type, each.enabled, each.dtype) for each in autocast_now(_DEVICES))
    return stage_kind(stage, value), offers_of(stage).wiring, shared, id(stage) if calls else None, autocast
