"""Inductor within a memory budget: the first training step of its code is watched, and what it takes counts.

A partition's peak is known to the byte where operators run one by one. Inductor fuses them, and has buffers of its own:
how much its code takes shows when it runs. Where the first step takes more than the budget, the graph is compiled again
before the next one: first with smaller fusions, since wide ones hold the values of several layers at once, then from a
partition that leaves room for what is still missing. Of all that was tried, what takes least is kept.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import CompileContext, TracingContext, compile_context, tracing

from rotor_profiling import storage_bytes, tensors_in
from rotor_profiling.isolate import accelerators
from rotor_py.errors import record_fields
from rotor_py.measure.device import limit_bytes
from rotor_py.partition.graph_watch import GraphWatch
from rotor_py.partition.partitioner import BudgetPartitioner
from rotor_py.units import format_bytes, limit_text

_log = logging.getLogger("rotor_py")
_MOST_COMPILATIONS = 4
"""Of one graph. A guess: each takes as long as the first."""
_FUSION = 4
"""Operators in one kernel, where wide fusions have taken too much. A guess; three blocks of a Llama came from 6.7 MB to
5.7 MB, where 5.9 were predicted. Inductor's own limit is 64."""

Call = Callable[..., Any]


class WatchedInductor(torch._TorchCompileInductorWrapper):
    """The backend inductor of `torch.compile` with these `options`, and a `partitioner` that has a budget."""

    def __init__(self, options: dict[str, Any], dynamic: bool | None, partitioner: BudgetPartitioner) -> None:
        super().__init__(None, options, dynamic)  # type: ignore[no-untyped-call] # torch leaves it so
        self._partitioner = partitioner

    def __call__(
        self, model_: fx.GraphModule, inputs_: list[Any], *, config_patches: dict[str, Any] | None = None
    ) -> Call:
        config = {**self.config, **(config_patches or {})}
        return WatchedGraph(Compilation(config, model_, inputs_), self._partitioner)


class Compilation:
    """Compiles one graph of TorchDynamo, now and later, as if TorchDynamo were still at it."""

    def __init__(self, config: dict[str, Any], graph: fx.GraphModule, inputs: list[Any]) -> None:
        # A copy, since compiling rewrites the graph. Parameters are inputs, so it is small.
        self._config, self._graph, self._inputs = config, copy.deepcopy(graph), inputs
        self._tracing, self._compiling = TracingContext.try_get(), CompileContext.try_get()

    def __call__(self, partitioner: BudgetPartitioner, *, narrow: bool) -> Call:
        """The compiled code, with small fusions if it is `narrow`."""
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        patches = {**self._config, "custom_partitioner_fn": partitioner}
        if narrow:
            patches["max_fusion_size"] = min(_FUSION, patches.get("max_fusion_size", config.max_fusion_size))
        with ExitStack() as around:
            if TracingContext.try_get() is None:
                around.enter_context(tracing(self._tracing))
                around.enter_context(compile_context(self._compiling))
            # The backward at once: a step in which it is compiled would show what compiling takes.
            around.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
            return cast(Call, compile_fx(copy.deepcopy(self._graph), self._inputs, config_patches=patches))


class WatchedGraph:
    """One graph's code. Its training steps are watched until one stays within the budget, or nothing helps."""

    def __init__(self, compilation: Callable[..., Call], partitioner: BudgetPartitioner) -> None:
        self._compile: Callable[..., Call] | None = compilation
        self._partitioner = partitioner.for_one_graph(0)
        self._call = compilation(self._partitioner, narrow=False)
        self._tried: list[tuple[int, Call]] = []
        """What was found to take too much, by its peak."""
        self._settled = False
        self._watch: GraphWatch | None = None

    def __call__(self, *arguments: Any) -> Any:
        if not self._settled and self._watch is not None and self._watch.peak is not None:
            self._account_for(self._watch.peak, _device(arguments))
        if self._settled or not torch.is_grad_enabled():
            return self._call(*arguments)
        if self._watch is not None and self._watch.in_flight:
            self._watch.give_up()  # what it would see is that of both
            return self._call(*arguments)
        self._watch = GraphWatch(_device(arguments), storage_bytes(tensors_in(arguments)))
        try:
            made = self._call(*arguments)
        except BaseException:
            self._watch.give_up()
            raise
        self._watch.forward_returned(tensors_in(made))
        return made

    def _account_for(self, peak: int, device: torch.device) -> None:
        """A step has taken so many bytes: compile again if they are above the budget, or say that nothing helps."""
        limit = limit_bytes(self._partitioner.limit, device)
        self._watch = None
        if peak <= limit:
            self._settle(self._call)
            return
        self._tried.append((peak, self._call))
        narrow_already = len(self._tried) > 1
        if len(self._tried) == _MOST_COMPILATIONS or (narrow_already and self._partitioner.found_least):
            least, call = min(self._tried, key=lambda each: each[0])
            count = len(self._tried)
            self._settle(call)
            _log.warning(
                "Inductor's code of a graph takes %s (%d bytes) in a training step, and its memory budget is %s (%d "
                "bytes); it was compiled %d times, and nothing took less: take a budget of %s or more, or a smaller "
                "batch",
                format_bytes(least), least, format_bytes(limit), limit, count, limit_text(least),
                extra=record_fields("graph_over_budget", peak_bytes=least, mem_limit=limit),
            )  # fmt: skip
            return
        _log.info(
            "Inductor's code of a graph takes %s (%d bytes) in a training step, and its memory budget is %s (%d "
            "bytes): it is compiled again to take less",
            format_bytes(peak), peak, format_bytes(limit), limit,
            extra=record_fields("compiled_again", peak_bytes=peak, mem_limit=limit),
        )  # fmt: skip
        before = self._partitioner
        if narrow_already:
            # What was missing, counted from the partition's own peak. That is not known where torch had the graphs in
            # its cache: then from what it may be.
            planned = limit - before.reserve if before.weight is None else before.weight.peak
            self._partitioner = before.for_one_graph(max(peak - planned, before.reserve + 1))
        else:
            self._partitioner = before.for_one_graph(0)
        assert self._compile is not None
        self._call = self._compile(self._partitioner, narrow=True)

    def _settle(self, call: Call) -> None:
        self._call, self._settled = call, True
        self._tried, self._compile = [], None  # which hold code and graphs


def _device(arguments: Any) -> torch.device:
    return next(iter(accelerators(tensor.device for tensor in tensors_in(arguments))), torch.device("cpu"))
