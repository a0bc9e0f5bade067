"""`torch.compile(model, backend="rotor", options={"mem_limit": "4GB"})`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import tensors_in
from rotor_profiling.devices import accelerators
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.graph.graph_stage import in_context
from rotor_py.capture.measured_graphs import MeasuredGraph
from rotor_py.capture.variants import compiled_variants
from rotor_py.compiled.options import config_of
from rotor_py.compiled.stage_compiler import StageCompiler
from rotor_py.execute.program import Program, program
from rotor_py.execute.tape import replay
from rotor_py.measure.budget import Budget, make_budget
from rotor_py.measure.cut import Cut, cut_layers
from rotor_py.measure.device import limit_bytes
from rotor_py.measure.planning_lock import planning
from rotor_py.measure.stage_measurer import StageMeasurer
from rotor_py.measure.stages import unmeasured_loss
from rotor_py.plan.input_spec import reaches, spec_of
from rotor_py.plan.ways import fastest
from rotor_py.units import parse_bytes
from rotor_solver import Persistent, simulate

_OPTIONS = {
    "mem_limit": None,
    "mem_slots": 500,
    "fresh_grads": False,
    "granularity": 100,
    "preserve_rng_state": True,
    "compile": False,
}


def rotor(
    graph_module: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """A backend of TorchDynamo: the graph's training steps stay inside a memory limit.

    Every graph is planned by itself, at its first call. Where Dynamo breaks a model into several graphs, use
    `Checkpointable`, which accounts for all of them. The options mean what they mean there:

        mem_limit: the peak of a training step, as bytes (an int) or as a text such as "4GB" or "80%" of the device;
            None is what the device can give this process.
        mem_slots: how finely the solver divides memory, 500 by default.
        fresh_grads: gradients are freed between steps, so that their memory is there for activations; False by default.
        granularity: the most stages into which a graph is cut, 100 by default.
        preserve_rng_state: whether what is computed again draws the same random numbers, True by default.
        compile: have Inductor compile the stages, where that makes the plan faster: True, a mode of `torch.compile`, or
            a dict of Inductor's options; False by default.

    Raises ValueError for an option that does not exist, and for a mode or a limit that cannot be read. The first call
    raises InfeasibleError (a ValueError) if no plan fits, and UnsupportedModelError if the graph cannot be cut.
    """
    chosen = {**_OPTIONS, **(options or {})}
    if unknown := chosen.keys() - _OPTIONS.keys():
        raise ValueError(f"{sorted(unknown)[0]!r} is no option of the backend rotor; it has {', '.join(_OPTIONS)}")
    if chosen["mem_limit"] is not None:
        # A limit that cannot be read is refused here; what it is on the device is known at the first call.
        parse_bytes(chosen["mem_limit"], device_bytes=1)
    # The model's buffers are not known here; those that Dynamo has lifted into placeholders are told by their names.
    return GraphPlanner(CapturedGraph(graph_module, frozenset(), int(chosen["granularity"])), chosen)


class GraphPlanner:
    """One graph, which is planned at its first call, and again when an input is larger than any before.

    A call raises InfeasibleError if no plan fits, and UnsupportedModelError if the graph cannot be cut.
    """

    def __init__(self, graph: CapturedGraph, options: dict[str, Any]) -> None:
        self.graph = graph
        self.options = options
        self.cut: Cut | None = None
        self.program: Program | None = None
        inductor = config_of(options["compile"])
        self.compiler = None if inductor is None else StageCompiler(inductor)
        self.reach: Any = None
        """The spec of the input that the plan is for; it serves all inputs that are no larger."""

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        """Run the graph on its inputs, and return its outputs: by the plan if gradients are on."""
        graph = self.graph
        if not torch.is_grad_enabled():
            return graph.run_unplanned(arguments)
        graph.split(arguments)
        if not graph.trains:
            return graph.run_unplanned(arguments)
        value, values = graph.enter(arguments)
        if self.program is None or not reaches(self.reach, value):
            with planning:
                self._plan(value, arguments)
        assert self.cut is not None
        assert self.program is not None
        for _, layer in self.cut.prefix:
            value = layer(value)
        runners, value = in_context(self.cut.stages, value, self.options["preserve_rng_state"])
        return graph.leave(replay(runners, self.program, value), values)

    def _plan(self, value: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        graph = self.graph
        tensors = tensors_in(arguments)
        device = next(iter(accelerators(t.device for t in tensors)), torch.device("cpu"))
        fresh = bool(self.options["fresh_grads"])
        # The caller of the graph holds its inputs throughout, so no plan can free them.
        cut = replace(cut_layers(graph.layers, value, device), input_owned=True)
        stages = StageMeasurer(
            cut,
            value,
            device,
            preserve_rng_state=self.options["preserve_rng_state"],
            fresh_gradients=fresh,
            silent=graph.silent,
        )
        stages.walk()
        stages.settle_layouts(())
        context, loss = graph.context_cost(arguments, device), unmeasured_loss(device, 0)
        plain = MeasuredGraph(graph, cut, stages, context, loss, value, ())
        variants = [] if self.compiler is None else compiled_variants(plain, self.compiler)
        # Parameters that no stage uses, and the optimizer, are unknown here and do not count.
        whole = nn.ModuleList(module for _, module in graph.layers)
        sample = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        limit = limit_bytes(self.options["mem_limit"], device)
        way, sequence = fastest(
            [*variants, plain],
            lambda way: make_budget(
                whole, (sample, value), way.measurement, device, fresh_gradients=fresh, optimizer=None
            ),
            partial(Budget.solve, mem_limit=limit, algorithm=Persistent(int(self.options["mem_slots"]))),
            lambda budget, sequence: simulate(budget.chain, sequence).makespan,
        )
        self.cut = way.cut
        self.program = program(len(self.cut.stages), sequence)
        self.reach = spec_of(value)
