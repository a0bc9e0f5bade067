"""Compiling stages: those of one kind once, in this process by a table and in the next one by Inductor's cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from rotor_profiling.stage.stage_signature import stage_signature
from rotor_py.compiled.budgets import Foreseen, OnlySurveyedError, Partitions, budget_of
from rotor_py.compiled.stage_code import Config, StageCode, compile_code, owned_slots
from rotor_py.errors import InfeasibleError, record_fields
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.restored.autocast import autocast_now

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

_log = logging.getLogger("rotor_py")

_DEVICES = (torch.device("cpu"), torch.device("cuda"))
"""Those whose autocast a stage may depend on."""


class StageCompiler:
    """Compiles the stages of one model with these options of Inductor.

    With `partitions`, stages can be stored in other ways than AOTAutograd's.
    """

    def __init__(self, config: Config, partitions: Partitions | None = None) -> None:
        self.config = config
        self._partitions = partitions
        self._codes: dict[Hashable, StageCode | None] = {}
        self._seconds_of: dict[StageCode, float] = {}
        self._foreseen: dict[StageCode, tuple[Foreseen, ...]] = {}
        self.seconds = 0.0
        """How long compiling has taken so far."""
        self._has_tools = True

    @property
    def kinds(self) -> int:
        """How many kinds of stages have been compiled, each way to store them counted."""
        return sum(code is not None for code in self._codes.values())

    def seconds_of(self, code: StageCode) -> float:
        """How long it took to compile."""
        return self._seconds_of[code]

    def foreseen(
        self, code: StageCode, stage: nn.Module, value: object, needs_gradient: Sequence[bool]
    ) -> tuple[Foreseen, ...]:
        """What other partitions of a `stage` would cost that has this `code` on inputs like `value`.

        None of them is compiled: the stage is traced once more.
        """
        if code not in self._foreseen:
            self._foreseen[code] = ()
            trained = any(tensor.requires_grad for _, _, tensor in owned_slots(stage))
            if self._partitions is not None and (trained or any(needs_gradient)):
                try:
                    compile_code(stage, value, needs_gradient, self.config, self._partitions.survey())
                except OnlySurveyedError as done:
                    self._foreseen[code] = done.found
        return self._foreseen[code]

    def code(
        self,
        stage: nn.Module,
        name: str,
        value: object,
        needs_gradient: Sequence[bool],
        partitioner: CustomPartitionerFn | None = None,
        way: str | None = None,
    ) -> StageCode | None:
        """The code for `stage` on inputs like `value`; `needs_gradient` says so of every tensor in it.

        It stores the stage by the `partitioner` or in a `way`, or else as AOTAutograd does without being told. None,
        after one line in the log, if stages of its kind cannot be compiled. InfeasibleError if the partitioner finds
        nothing that fits.
        """
        leaves, spec = tree_flatten(value)
        flags = iter(needs_gradient)
        like = [
            leaf.detach().requires_grad_(next(flags)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        kind = _kind(stage, tree_unflatten(like, spec)), partitioner, way
        if kind not in self._codes:
            self._codes[kind] = self._compile(stage, name, value, needs_gradient, partitioner, way)
        return self._codes[kind]

    def _compile(
        self,
        stage: nn.Module,
        name: str,
        value: object,
        needs_gradient: Sequence[bool],
        partitioner: CustomPartitionerFn | None,
        way: str | None,
    ) -> StageCode | None:
        if not self._has_tools:
            return None
        began = time.perf_counter()
        if way is not None and self._partitions is not None:
            partitioner = self._partitions.within(budget_of(way))
        try:
            code = compile_code(stage, value, needs_gradient, self.config, partitioner)
            self._seconds_of[code] = time.perf_counter() - began
            return code
        except InfeasibleError:
            raise
        # Whatever AOTAutograd, Inductor or the compiler of the machine raise: plain, the stage trains as well.
        except Exception as error:
            cause = str(error).strip().partition("\n")[0] or type(error).__name__
            self._has_tools = not _misses_tools(error)
            _log.warning(
                "%s is not compiled: %s",
                name if self._has_tools else "the model",
                cause,
                extra=record_fields("not_compiled", name=name if self._has_tools else "the model"),
            )
            return None
        finally:
            self.seconds += time.perf_counter() - began


def _misses_tools(error: Exception) -> bool:
    """Whether a compiler is missing, so that nothing else can be compiled, either."""
    from torch._inductor import exc

    missing = exc.InvalidCxxCompiler, exc.TritonMissing, exc.GPUTooOldForTriton
    return isinstance(getattr(error, "inner_exception", error), missing)


def _kind(stage: nn.Module, value: object) -> Hashable:
    """A key that is equal for stages that the same code serves."""
    numbers: dict[int, int] = {}
    shared = tuple(numbers.setdefault(id(tensor), len(numbers)) for _, _, tensor in owned_slots(stage))
    # What a graph calls that is a module, the kind of a stage does not say. A bare module is called by nobody: it holds
    # the parameters of a module of `fully_shard`.
    graphs = [module for module in stage.modules() if isinstance(module, fx.GraphModule)]
    calls = any(type(child) is not nn.Module for graph in graphs for child in graph.children())
    autocast = tuple((each.device_type, each.enabled, each.dtype) for each in autocast_now(_DEVICES))
    return stage_signature(stage, value), offers_of(stage).wiring, shared, id(stage) if calls else None, autocast
