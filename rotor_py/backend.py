"""`torch.compile(model, backend="rotor", options={"mem_limit": "4GB"})`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import tensors_in
from rotor_profiling.devices import accelerators
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.graph_stage import in_context
from rotor_py.capture.run_graph import run_graph
from rotor_py.execute.program import Program, program
from rotor_py.execute.tape import replay
from rotor_py.measure.budget import make_budget
from rotor_py.measure.cut import Cut, cut_layers
from rotor_py.measure.device import limit_bytes
from rotor_py.measure.planning_lock import planning
from rotor_py.measure.stages import measure
from rotor_py.plan.input_spec import reaches, spec_of
from rotor_py.units import parse_bytes
from rotor_solver import Persistent

_OPTIONS = {"mem_limit": None, "mem_slots": 500, "fresh_grads": False, "granularity": 100, "preserve_rng_state": True}


def rotor(
    graph_module: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """A backend of TorchDynamo: the graph's training steps stay inside options["mem_limit"], bytes or a text.

    Every graph is planned by itself, at its first call. Where Dynamo breaks a model into several graphs,
    `Checkpointable` accounts for all of them. ValueError for an option that is not known: those of `Checkpointable`
    are `mem_limit`, `mem_slots`, `fresh_grads`, `granularity` and `preserve_rng_state`.
    """
    chosen = {**_OPTIONS, **(options or {})}
    if unknown := chosen.keys() - _OPTIONS.keys():
        raise ValueError(f"{sorted(unknown)[0]!r} is no option of the backend rotor; it has {', '.join(_OPTIONS)}")
    if chosen["mem_limit"] is not None:
        parse_bytes(chosen["mem_limit"], device_bytes=1)
    planner = _Planner(chosen)
    return CapturedGraph(graph_module, frozenset(), int(chosen["granularity"]), planner)


class _Planner:
    """Plans one graph, and again where an input is larger than before."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.cut: Cut | None = None
        self.program: Program | None = None
        self.reach: Any = None

    def __call__(self, graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
        if not torch.is_grad_enabled():
            return list(run_graph(graph.graph_module, arguments))
        graph.split(arguments)
        if not graph.trains:
            return list(run_graph(graph.graph_module, arguments))
        value, values = graph.enter(arguments)
        if self.program is None or not reaches(self.reach, value):
            with planning:
                self._plan(graph, value, arguments)
        assert self.cut is not None
        assert self.program is not None
        for _, layer in self.cut.prefix:
            value = layer(value)
        preserve = self.options["preserve_rng_state"]
        runners, value = in_context(self.cut.stages, value, preserve)
        return graph.leave(replay(runners, self.program, value), values)

    def _plan(self, graph: CapturedGraph, value: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        tensors = tensors_in(arguments)
        device = next(iter(accelerators(t.device for t in tensors)), torch.device("cpu"))
        fresh = bool(self.options["fresh_grads"])
        self.cut = replace(cut_layers(graph.layers, value, device), input_owned=True)
        measurement = measure(
            self.cut,
            value,
            device,
            preserve_rng_state=self.options["preserve_rng_state"],
            fresh_gradients=fresh,
            silent=graph.silent,
        )
        measurement = replace(measurement, prefix=graph.context_cost(arguments, device))
        whole = nn.ModuleList(module for _, module in graph.layers)
        sample = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        budget = make_budget(whole, (sample, value), measurement, device, fresh_gradients=fresh, optimizer=None)
        limit = limit_bytes(self.options["mem_limit"], device)
        sequence = budget.solve(limit, Persistent(int(self.options["mem_slots"])))
        self.program = program(len(self.cut.stages), sequence)
        self.reach = spec_of(value)
