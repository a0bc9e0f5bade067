"""Partition a joint graph into forward and backward so that a step stays within a budget in bytes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import (
    CompileContext,
    CustomGraphPass,
    CustomPartitionerFn,
    fx_graph_cse,
    partitioners,
)
from rotor_profiling.torch_compat import functorch_config as config
from rotor_py.compile.candidates import by_torch, candidates, torch_partitions
from rotor_py.compile.joint_graph import JointGraph, guard_sizes
from rotor_py.compile.partition import GraphCosts, Partition, Weight, extract
from rotor_py.errors import InfeasibleError, record_fields
from rotor_py.measure.cache import code_digest
from rotor_py.measure.device import limit_bytes
from rotor_py.units import exact_bytes, format_bytes, limit_text
from rotor_solver import Chain

_log = logging.getLogger("rotor_py")
# If even the least estimated peak exceeds the limit, but by at most this factor, its partition is tried: what Inductor
# fuses is known only after compiling. A guess: where measured, the estimate was up to a tenth too high.
_UNCERTAIN = 1.2
_FOLDER = Path(__file__).parent  # whose code is part of keys of torch's cache: other code may partition differently


class _Partitioner(CustomPartitionerFn):
    """Split each joint graph of AOTAutograd into the forward and backward of the partition that `choose` returns."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        outputs: int = kwargs["num_fwd_outputs"]
        static: list[int] | None = kwargs.get("static_lifetime_input_indices")
        # First run the same graph passes as PyTorch's own partitioner.
        gm.graph.eliminate_dead_code()
        if config.cse:
            gm.graph = fx_graph_cse(gm.graph)
        if not config.unsafe_allow_optimization_of_collectives:
            partitioners.force_save_collectives(gm)
        partitioners.force_save_effectful_ops(gm)
        partitioners.force_save_bw_mutation_src(gm)
        joint = JointGraph(gm, outputs)
        if not joint.backward:
            return partitioners.default_partition(
                gm, joint_inputs, num_fwd_outputs=outputs, static_lifetime_input_indices=static
            )
        return extract(joint, self.choose(joint), static)

    def choose(self, joint: JointGraph) -> Partition:
        raise NotImplementedError


@dataclass(frozen=True)
class BudgetPartitioner(_Partitioner):
    """Partition joint graphs so that a step of each stays within `limit`. Partitioners of equal settings are equal."""

    limit: int | str
    fused: bool = False  # whether Inductor fuses the operators of the graphs
    estimated: bool = False  # whether the predicted peak is an estimate for fused code, which the caller measures
    loss: int = 0  # bytes that the loss holds between forward and backward, beyond the outputs and their gradients
    # Maps TorchDynamo's frame ids to costs of the frame's last partition. Each graph break begins a new frame.
    chosen: dict[int, Weight] = field(default_factory=dict, compare=False, repr=False)
    reserve: int = 0  # bytes of the limit kept free for buffers that Inductor's code allocates beyond the prediction
    # Costs for the last graph: of its partition (key "chosen"), and of all candidates, by rising peak ("candidates").
    _last: dict[str, list[Weight]] = field(default_factory=dict, compare=False, repr=False)

    def for_one_graph(self, reserve: int) -> BudgetPartitioner:
        return replace(self, reserve=reserve, _last={})

    @property
    def weight(self) -> Weight | None:
        """Costs of the last chosen partition; None if the compiled code came from torch's cache."""
        return self._last["chosen"][0] if self._last else None

    @property
    def found_least(self) -> bool:
        return bool(self._last) and self._last["chosen"][0] is self._last["candidates"][0]

    def gain(self, limit: int) -> float:
        """Predict the share by which the last graph's step would be faster if partitioned for another `limit`."""
        fitting = [each for each in self._last.get("candidates", ()) if each.peak <= limit]
        return 1 - fitting[-1].seconds / max(self._last["chosen"][0].seconds, 1e-12) if fitting else 0.0

    def __deepcopy__(self, memo: object) -> BudgetPartitioner:
        return self  # torch copies its options before every compilation, but `chosen` must be filled in this object

    def __reduce__(self) -> tuple[Any, ...]:
        return BudgetPartitioner, (self.limit, self.fused, self.estimated, self.loss, {}, self.reserve)

    def choose(self, joint: JointGraph) -> Partition:
        guard_sizes(joint.inputs)
        limit = limit_bytes(self.limit, joint.device)
        room = limit - self.reserve
        costs = GraphCosts.of(joint, fused=self.fused, estimated=self.estimated, loss=self.loss)
        usual = by_torch(joint, costs, [1])[0] if self.fused else None
        if usual is not None and usual.weight.peak <= room:
            found, best = [usual], usual  # PyTorch's own partition fits, so take it without looking for others
        else:
            found = candidates(joint, costs, usual)
            fitting = [each for each in found if each.weight.peak <= room]
            least = found[0].weight.peak
            if not fitting and not self.reserve and least > (_UNCERTAIN if self.estimated else 1) * room:
                message = (
                    f"take a budget of {limit_text(least)} or more, or a smaller batch: the memory budget is "
                    f"{exact_bytes(limit)}, and a training step of this graph needs at least {exact_bytes(least)}"
                )
                raise InfeasibleError(message, min_bytes=least, mem_limit=limit)
            best = fitting[-1] if fitting else found[0]
        self._last.update(chosen=[best.weight], candidates=[each.weight for each in found])
        self._log(best.weight, limit)
        return best.partition

    def _log(self, weight: Weight, limit: int) -> None:
        _log.info(
            "a graph's training step takes %s of its budget of %s, saves %s, and recomputes for %.1f %% of its time",
            *map(format_bytes, (weight.peak, limit, weight.saved)),
            100 * weight.replayed_seconds / max(weight.seconds, 1e-12),
            extra=record_fields("partitioned", peak_bytes=weight.peak, mem_limit=limit),
        )
        compiling = CompileContext.current_compile_id()
        self.chosen[-1 if compiling is None or compiling.frame_id is None else compiling.frame_id] = weight
        together = sum(each.peak for each in self.chosen.values())
        if len(self.chosen) > 1 and together > limit:
            _log.warning(
                "remove graph breaks, or take a smaller budget: the model is compiled as %d graphs, each within its "
                "memory budget of %s, but a step holds the memory of all graphs, which may be %s",
                graphs := len(self.chosen), format_bytes(limit), format_bytes(together),
                extra=record_fields("graphs_over_budget", graphs=graphs, peak_bytes=together, mem_limit=limit),
            )  # fmt: skip

    def uuid(self) -> Any:
        limit: object = self.limit
        if isinstance(limit, str) and limit.rstrip().endswith("%"):  # a percentage differs in bytes between machines
            cuda = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
            limit = [limit_bytes(self.limit, device) for device in (torch.device("cpu"), *cuda)]
        how = f"{self.fused} {self.estimated} {self.loss} {self.reserve}"
        return f"rotor_py.memory_budget {limit} {how} {code_digest(_FOLDER)}"


def whole_partitioner(limit: int, step: Chain) -> BudgetPartitioner:
    """Return a partitioner for a model compiled as one graph. The loss takes as many bytes as in the chain `step`."""
    return BudgetPartitioner(limit, fused=True, estimated=True, loss=step.loss_temp)


@dataclass(frozen=True)
class SharePartitioner(_Partitioner):
    """Partition so as to save what PyTorch's partitioner saves for a budget: `share` of the bytes it saves by default.

    `extract` makes forward and backward: those of PyTorch's partitioner would draw a dropout's mask twice (torch 2.13).
    """

    share: float

    def choose(self, joint: JointGraph) -> Partition:
        return torch_partitions(joint, [self.share])[0]

    def uuid(self) -> str:
        return f"rotor_py.compile.stage_code {self.share} {code_digest(_FOLDER)}"


# In a graph with convolutions, Inductor converts images and weights to channels-last. Of each weight saved for the
# backward, it would save a converted copy, which the graph does not show: 8 of the 27 MB of a U-Net's step. Inductor
# does not convert outputs that the user sees, so declare saved inputs visible. Then the backward converts them.


_PASSES = "post_grad_custom_post_pass"
_SEEN = "user_visible_output_idxs"


def saving_inputs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's `options` with `SavedInputs` as last graph pass, so that saved inputs keep their layouts."""
    passes = options.get(_PASSES, getattr(torch_compat.inductor_config, _PASSES))
    if passes is None:
        return {**options, _PASSES: SavedInputs()}
    others = passes if isinstance(passes, list | tuple) else [passes]
    return {**options, _PASSES: [*(each for each in others if not isinstance(each, SavedInputs)), SavedInputs()]}


class SavedInputs(CustomGraphPass):
    """Graph pass that declares returned inputs and their views visible to the user, so that their layouts stay."""

    def __call__(self, graph: fx.Graph) -> None:
        end = graph.output_node()
        (returned,) = end.args
        assert isinstance(returned, list | tuple)
        given = {storage for node in graph.find_nodes(op="placeholder") for storage in _storages(node)}
        seen = {position for position, each in enumerate(returned) if not given.isdisjoint(_storages(each))}
        end.meta[_SEEN] = sorted(seen.union(end.meta.get(_SEEN, ())))

    def uuid(self) -> str:
        return "rotor_py.compile.partitioner.SavedInputs 1"


def _storages(node: object) -> set[int]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return {value.untyped_storage()._cdata} if isinstance(value, torch.Tensor) else set()
