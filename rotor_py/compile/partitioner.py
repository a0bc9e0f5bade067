"""Partition a joint graph within a budget in bytes."""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rotor_profiling.storage import tensors_in
from rotor_profiling.torch_compat import CompileContext, CustomPartitionerFn, fx_graph_cse, partitioners
from rotor_profiling.torch_compat import functorch_config as config
from rotor_py.compile.candidates import (
    Candidate,
    by_budgets,
    candidates,
    fastest_within,
    programs_by_budgets,
    rival_within,
    undominated,
    usual,
)
from rotor_py.compile.joint_graph import JointGraph, guard_sizes
from rotor_py.compile.peak import GraphCosts, Weight
from rotor_py.compile.program import extract
from rotor_py.compile.stage_code import BUDGETS, Foreseen, OnlySurveyedError, way_of
from rotor_py.errors import InfeasibleError, record_fields
from rotor_py.measure.device import limit_bytes
from rotor_py.units import format_bytes, limit_text
from rotor_solver import Chain

# Recompute dropout's output from its mask, so that one byte per element is kept instead of four.
#
# Recomputing dropout itself would draw anew. The CPU's operator multiplies by the mask, and then by the scale; the two
# operators added here do the same, bit for bit. Not on other devices: CUDA's kernel rounds once. Inductor decomposes
# dropout itself.


aten = torch.ops.aten


def add_stand_ins(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Add nodes that make each dropout's output from its input and mask; return these stand-ins by output."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        source, probability, training = node.args
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if training is False or not {0, 1} <= parts.keys() or source.meta["val"].device.type != "cpu":
            continue
        output, mask = parts[0], parts[1]
        output.prepend(mask)
        scale = 0.0 if probability == 1 else 1 / (1 - probability)
        with graph.inserting_before(output):
            masked = _multiply(graph, source, mask, node)
            found[output] = _multiply(graph, masked, scale, node)
    return found


def _multiply(graph: fx.Graph, left: fx.Node, right: fx.Node | float, beside: fx.Node) -> fx.Node:
    made = graph.call_function(aten.mul.Tensor, (left, right))
    made.meta = {
        key: value for key, value in beside.meta.items() if key not in ("val", "tensor_meta", "eager_input_vals")
    }
    value = left.meta["val"]
    with value.fake_mode:
        made.meta["val"] = aten.mul.Tensor(value, right.meta["val"] if isinstance(right, fx.Node) else right)
    return made


_log = logging.getLogger("rotor_py")


@dataclass(frozen=True)
class BudgetPartitioner(CustomPartitionerFn):
    """Partitions joint graphs so that each stays within `limit`. Partitioners of equal limits are equal."""

    limit: int | str
    fused: bool = False
    """Whether Inductor fuses the operators of the graphs."""
    estimated: bool = False
    """Whether the peak is an estimate for fused code, and no bound: the caller measures."""
    loss: int = 0
    """Bytes in use between forward and backward, beyond the outputs and their gradients."""
    chosen: dict[int, Weight] = field(default_factory=dict, compare=False, repr=False)
    """Last choice per frame of the model. Graph breaks begin new frames."""
    reserve: int = 0
    """Bytes of the limit reserved for the compiler's own buffers."""
    by_torch: bool | None = None
    """Whether to choose among PyTorch's programs (True), ours (False), or both (None)."""
    _for_graph: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def for_one_graph(self, reserve: int) -> BudgetPartitioner:
        """Return a copy that remembers its choice: only one call's graph comes to it."""
        return replace(self, reserve=reserve, _for_graph={})

    @property
    def weight(self) -> Weight | None:
        """The last choice; None if torch had the graphs in its cache."""
        return self._for_graph.get("weight")

    def weight_within(self, limit: int) -> Weight | None:
        """Return the choice for the last graph within another limit; None if nothing fits."""
        fitting = [each for each in self._for_graph.get("choices", ()) if each.peak <= limit - self.reserve]
        return fitting[-1] if fitting else None

    @property
    def rival(self) -> BudgetPartitioner | None:
        """The same partitioner for the other maker's program, if that may be as fast as the chosen one."""
        other = self._for_graph.get("rival")
        return None if other is None else replace(self, by_torch=other.by_torch, _for_graph={})

    @property
    def found_least(self) -> bool:
        """Whether the choice is the program of least memory."""
        return bool(self._for_graph.get("least"))

    def __deepcopy__(self, memo: object) -> BudgetPartitioner:
        return self  # torch copies its settings before every compilation

    def __reduce__(self) -> tuple[Any, ...]:
        return BudgetPartitioner, (self.limit, self.fused, self.estimated, self.loss, {}, self.reserve, self.by_torch)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the graphs of the forward and of the backward. Raises InfeasibleError if no partition fits."""
        num_outputs: int = kwargs["num_fwd_outputs"]
        static_inputs: list[int] | None = kwargs.get("static_lifetime_input_indices")
        prepare(gm)
        joint = JointGraph(gm, num_outputs, add_stand_ins(gm.graph))
        if not joint.backward:
            return partitioners.default_partition(
                gm, joint_inputs, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static_inputs
            )
        guard_sizes(joint.inputs)
        limit = limit_bytes(self.limit, _device(joint))
        best = self._best(joint, limit)
        self._for_graph["weight"] = best.weight
        self._note(best.weight, limit)
        return extract(joint, best.program, static_inputs)

    def _best(self, joint: JointGraph, limit: int) -> Candidate:
        room = limit - self.reserve
        self._for_graph.update(least=False, rival=None)
        costs = GraphCosts.of(joint, fused=self.fused, estimated=self.estimated, loss=self.loss)
        usually = [usual(joint, costs)] if self.fused and self.by_torch is not False else []
        self._for_graph["choices"] = [each.weight for each in usually]
        if usually and usually[0].weight.peak <= room and not costs.faster_again:
            return usually[0]
        found = [*candidates(joint, costs, fused=self.fused), *usually]
        others = undominated([each for each in found if self.by_torch in (None, each.by_torch)])
        self._for_graph["choices"] = [each.weight for each in others]
        best = fastest_within(others, room)
        if best is None and self.reserve:
            best = others[0]
        if best is None:
            least = others[0].weight.peak
            raise InfeasibleError(
                f"a training step of this graph needs at least {format_bytes(least)} ({least} bytes), and its memory "
                f"budget is {format_bytes(limit)} ({limit} bytes); take a smaller batch, or a budget of "
                f"{limit_text(least)} or more",
                min_bytes=least,
                mem_limit=limit,
            )
        self._for_graph["least"] = best is others[0]
        if self.fused and self.by_torch is None:
            self._for_graph["rival"] = rival_within(found, room, best)
        return best

    def _note(self, weight: Weight, limit: int) -> None:
        _log.info(
            "a graph's training step takes %s of its budget of %s: %s are saved, %.1f %% of its time runs again",
            format_bytes(weight.peak),
            format_bytes(limit),
            format_bytes(weight.saved),
            100 * weight.replayed_seconds / max(weight.seconds, 1e-12),
            extra=record_fields("partitioned", peak_bytes=weight.peak, mem_limit=limit),
        )
        compiling = CompileContext.current_compile_id()
        frame = None if compiling is None else compiling.frame_id
        self.chosen[-1 if frame is None else frame] = weight
        together = sum(each.peak for each in self.chosen.values())
        if len(self.chosen) > 1 and together > limit:
            _log.warning(
                "the model is compiled as %d graphs; each stays within its memory budget of %s, but one is held while "
                "another runs, and together they may take up to %s; take out the graph breaks, or a smaller budget",
                len(self.chosen),
                format_bytes(limit),
                format_bytes(together),
                extra=record_fields(
                    "graphs_over_budget", graphs=len(self.chosen), peak_bytes=together, mem_limit=limit
                ),
            )

    def uuid(self) -> Any:
        """Return the key for PyTorch's caches of compiled graphs: the budget, and this code."""
        limit: object = self.limit
        if isinstance(limit, str) and limit.rstrip().endswith("%"):  # other bytes on another machine
            limit = [limit_bytes(self.limit, device) for device in (torch.device("cpu"), *_accelerators())]
        how = f"{self.fused} {self.estimated} {self.loss} {self.reserve} {self.by_torch}"
        return f"rotor_py.memory_budget {limit} {how} {code_digest()}"


def whole_partitioner(limit: int, step: Chain, by_torch: bool | None = None) -> BudgetPartitioner:
    """Return a partitioner for a graph compiled whole, in a step that costs `step`. Inductor's code is measured."""
    return BudgetPartitioner(limit, fused=True, estimated=True, loss=step.loss_temp, by_torch=by_torch)


def prepare(module: fx.GraphModule) -> None:
    """Apply to a joint graph the passes of PyTorch's own partitioner before it chooses."""
    module.graph.eliminate_dead_code()
    if config.cse:
        module.graph = fx_graph_cse(module.graph)
    if not config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(module)
    partitioners.force_save_effectful_ops(module)
    partitioners.force_save_bw_mutation_src(module)


def _device(joint: JointGraph) -> torch.device:
    """Return the device whose memory counts: an accelerator if the graph uses one."""
    tensors = tensors_in([node.meta.get("val") for node in joint.inputs])
    return next((each.device for each in tensors if each.device.type != "cpu"), torch.device("cpu"))


def _accelerators() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


@cache
def code_digest() -> str:
    """Return a digest of this folder's code: other code may partition differently under equal budgets."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Survey(CustomPartitionerFn):
    """Inspects the partitions of a graph, and ends the compilation."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Raises OnlySurveyedError."""
        prepare(gm)
        joint = JointGraph(gm, kwargs["num_fwd_outputs"])
        if not joint.backward:
            raise OnlySurveyedError(())
        usual, *others = by_budgets(joint, [1, *BUDGETS])
        ways = zip(map(way_of, BUDGETS), others, strict=True)
        raise OnlySurveyedError(tuple(_foreseen(way, other, usual) for way, other in ways))

    def uuid(self) -> str:
        """Return a constant: nothing is compiled that a cache could return."""
        return "rotor_py.compile.stage_code"


def _foreseen(way: str, found: Candidate, usual: Candidate) -> Foreseen:
    weight, before = found.weight, usual.weight
    temp = (weight.backward_peak - weight.saved) - (before.backward_peak - before.saved)
    return Foreseen(way, weight.saved, before.saved, temp, weight.seconds / max(before.seconds, 1e-12))


# Partitions of compiled stages by the budgets of PyTorch's partitioner.
#
# The kept values are those of PyTorch's own partitioner. The graphs are ours: with a budget, PyTorch's draw a dropout's
# random numbers anew in the backward (seen in torch 2.13), and ours draw nothing twice.


class StagePartitions:
    """The partitions of stages by budgets."""

    def survey(self) -> CustomPartitionerFn:
        return Survey()

    def within(self, budget: float) -> CustomPartitionerFn:
        return _Within(budget)


@dataclass(frozen=True)
class _Within(CustomPartitionerFn):
    """Partitions a graph by a budget."""

    budget: float

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the graphs of the forward and of the backward."""
        num_outputs: int = kwargs["num_fwd_outputs"]
        static_inputs: list[int] | None = kwargs.get("static_lifetime_input_indices")
        prepare(gm)
        joint = JointGraph(gm, num_outputs)
        if not joint.backward:
            return partitioners.default_partition(
                gm, joint_inputs, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static_inputs
            )
        (program,) = programs_by_budgets(joint, [self.budget])
        return extract(joint, program, static_inputs)

    def uuid(self) -> str:
        """Return the key for PyTorch's caches of compiled graphs: the budget, and this code."""
        return f"rotor_py.compile.stage_code {self.budget} {code_digest()}"
