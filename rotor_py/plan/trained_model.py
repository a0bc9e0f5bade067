"""Describe a planned model: the module that users call, its part that is cut into stages, and the processes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from rotor_profiling import OptimizerCost, bytes_like, optimizer_cost, together
from rotor_profiling.backends import prediction
from rotor_profiling.isolate import accelerators
from rotor_profiling.optimizer import plain_step, step_bytes_without
from rotor_profiling.torch_compat import tree_leaves
from rotor_py.distributed.processes import alone_in_a_prediction, around, communication_bytes, gather_objects, processes
from rotor_py.distributed.sharding import at_rest, is_sharded, keeps_gradients
from rotor_py.errors import OffloadError, UnsupportedModelError
from rotor_py.measure.budget import Budget, make_budget
from rotor_py.measure.device import limit_bytes
from rotor_py.measure.fixed_memory import (
    NONE_STEPPED,
    SteppedParameters,
    static_infeasibility,
    stepped_parameters,
    trained_bytes,
)
from rotor_py.measure.measurement import Measurement
from rotor_py.offload.offload_saved import Tier
from rotor_py.offload.open_tier import link_of, opened
from rotor_py.plan.settings import SHARDED, Settings, one_process_only
from rotor_py.plan.step_spec import ModelState, TensorSpec
from rotor_py.stage.named_state import locations_of, named_state_kept
from rotor_py.stage.replayed_routing import streams_kept
from rotor_solver import InfeasibleError, Sequence

late_optimizers: WeakKeyDictionary[TrainedModel, WeakKeyDictionary[torch.optim.Optimizer, OptimizerCost | None]]
late_optimizers = WeakKeyDictionary()
"""For each model without a declared optimizer, maps every optimizer that has stepped to its cost; to None if it trains
other models, if its cost is unknown, or if an outer optimizer's cost includes it.

All keys are weak, so that the tables do not keep a model or an optimizer alive.
"""

# Maps each `core` to its number of planned forwards and backwards, of all its planners together.
_planned: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def cost_of(optimizer: torch.optim.Optimizer) -> OptimizerCost:
    """Return `optimizer_cost`. Restores what the code of the step names, such as a counter in its class."""
    step, kind = plain_step(type(optimizer)), type(optimizer)
    with streams_kept(step), named_state_kept([*locations_of(step), *locations_of(kind)]):
        return optimizer_cost(optimizer)


class TrainedModel:
    """The module that users call (`whole`), and the one inside DDP and compile wrappers (`core`), cut into stages."""

    def __init__(self, whole: nn.Module, core: nn.Module, settings: Settings) -> None:
        self.whole = whole
        self.core = core
        self.settings = settings
        # whether the caller has held outputs other than the loss through a backward
        self.holds_outputs = False
        # the optimizer's parameters when `stepped` was last computed, and its result
        self._stepped: tuple[object, SteppedParameters] | None = None

    @property
    def name(self) -> str:
        return type(self.core).__name__

    @property
    def planned(self) -> int:
        """The number of planned forwards, and of backwards through them, that have begun."""
        return _planned.get(self.core, 0)

    def note_planned(self) -> None:
        _planned[self.core] = self.planned + 1

    @property
    def group(self) -> ProcessGroup | None:
        """The group of the processes that train this model together; None if this process trains it alone."""
        if not dist.is_initialized():
            return None
        given = self.settings.process_group
        found = given if given is not None else processes(self.whole)
        return found if found is not None and dist.get_world_size(found) > 1 else None

    @cached_property
    def tier(self) -> Tier:
        """The tier of the setting `offload`, opened at first use."""
        assert self.settings.offload is not None
        return opened(self.settings.offload)

    @property
    def alone(self) -> bool:
        return self.group is None

    def refuse_several_processes(self) -> None:
        """Raise UnsupportedModelError if several processes train, or the model is sharded, against a setting."""
        option, offload = one_process_only(self.settings), one_process_only(self.settings, SHARDED)
        if option is None and offload is None:
            return
        sharded = is_sharded(self.core) or any(hasattr(each, "device_mesh") for each in self.core.parameters())
        if offload is not None and sharded:
            text = f"leave offload= out: {self.name} is sharded, and {offload.why}"
            raise UnsupportedModelError(text, kind="excluded_together", name="offload")
        if option is not None and (not self.alone or sharded):
            text = f"leave {option.first} out: {self.name} is trained by several processes or sharded, and {option.why}"
            raise UnsupportedModelError(text, kind="one_process_only", name=option.first)

    def device_of(self, spec: Any = None) -> torch.device:
        """Return the device of the parameters and of the input `spec`. UnsupportedModelError if there are several."""
        inputs = [leaf.device for leaf in tree_leaves(spec) if isinstance(leaf, TensorSpec)]
        found = accelerators({*ModelState.of(self.core).devices, *inputs})
        if len(found) > 1:
            text = f"put model and input on one device, since a plan is for one: got {', '.join(map(str, found))}"
            raise UnsupportedModelError(text, kind="several_devices")
        return found[0] if found else torch.device("cpu")

    def stepped(self) -> SteppedParameters:
        optimizer = self.settings.step_in_backward
        if optimizer is None:
            return NONE_STEPPED
        # Cache the result: planning reads it often, and to measure the bytes of an optimizer step, a copy has to step.
        groups = [group["params"] for group in optimizer.param_groups]
        now = tuple((id(each), each.requires_grad) for parameters in groups for each in parameters)
        if self._stepped is None or self._stepped[0] != now:
            self._stepped = now, stepped_parameters(self.core, optimizer)
        return self._stepped[1]

    def stepping(self) -> dict[str, Any] | None:
        """Return a dict for plan files of the `step_in_backward` optimizer and the bytes it needs; None without one."""
        optimizer = self.settings.step_in_backward
        if optimizer is None:
            return None
        stepped = self.stepped()
        return {
            "optimizer": type(optimizer).__name__,
            "gradient_bytes": bytes_like(stepped.among(self.core.parameters())),
            "scratch_bytes": max(stepped.scratch.values(), default=0),
        }

    def counted_optimizer(self) -> OptimizerCost | None:
        """Return the cost of the declared optimizer, or of the detected ones that still exist; None without any."""
        given = self.settings.optimizer
        if given is None:
            costs = [cost for cost in late_optimizers.get(self, {}).values() if cost is not None]
            return together(costs) if costs else None
        cost, stepped = cost_of(given), self.stepped()
        return replace(cost, step_bytes=step_bytes_without(given, set(stepped.scratch))) if stepped else cost

    def limit_bytes(self, device: torch.device) -> int:
        return limit_bytes(self.settings.mem_limit, device)

    def budget(self, measurement: Measurement, sample: Any, device: torch.device) -> Budget:
        cost, stepped = self.counted_optimizer(), self.stepped()
        with at_rest(self.core):
            budget = make_budget(
                self.core,
                sample,
                measurement,
                device,
                fresh_gradients=self.settings.fresh_grads,
                optimizer=cost,
                communication=communication_bytes(self.whole),  # DDP allocates buckets even in a single process
                buckets=around(self.whole) is not None,
                stepped=stepped,
            )
        if (name := self.settings.offload) is not None:
            kind, other = ("cuda", "file:/path") if name == "host" else ("cpu", "host")
            if device.type != kind and prediction() is None:  # tensors of a simulated device are on the CPU
                text = f"use offload={other!r}: {name!r} is for tensors of {kind} devices, and the model is on {device}"
                raise UnsupportedModelError(text, kind="other_device", name="offload")
            budget = replace(budget, link=link_of(name, device), link_name=name)
        budget = self.with_forwards(budget, measurement, device, self.settings.forwards_in_flight)
        return replace(budget, backward_order=self.settings.backward_order or "any")

    def reserve(self, budget: Budget, sequence: Sequence, group: ProcessGroup | None = None) -> None:
        """Reserve bytes in the tier for a step by `sequence`. OffloadError if a process of `group` has too few."""
        if self.settings.offload is None or sequence.moves is None:
            return
        refused = ""
        try:
            if nbytes := budget.moved_bytes(sequence):
                self.tier.reserve(nbytes)
        except OffloadError as error:
            if group is None:
                raise
            refused = str(error)
        for rank, each in enumerate([] if group is None else gather_objects(refused, group, self.device_of())):
            if each:
                raise OffloadError(f"rank {rank}: {each}", kind="cannot_offload_on_rank", rank=rank)

    def static_infeasibility(self, sample: Any, device: torch.device) -> InfeasibleError | None:
        """Return an error if parameters, gradients, optimizer state and `sample` exceed the limit; None otherwise."""
        settings = self.settings
        if settings.by_hand is not None and settings.mem_limit is None:
            return None
        with at_rest(self.core):
            return static_infeasibility(
                self.core,
                sample,
                device,
                self.limit_bytes(device),
                fresh_gradients=settings.fresh_grads,
                optimizer=self.counted_optimizer(),
                stepped=self.stepped(),
            )

    def with_forwards(self, budget: Budget, measurement: Measurement, device: torch.device, forwards: int) -> Budget:
        """Return `budget` for this number of forwards in flight; unchanged if it is for as many or more."""
        if forwards <= budget.forwards:
            return budget
        with at_rest(self.core):
            gradients = trained_bytes(self.core, device)
        return budget.with_forwards(forwards, measurement, gradients)

    def with_fresh_gradients(self, budget: Budget, measurement: Measurement, device: torch.device) -> Budget:
        with at_rest(self.core):
            gradients = trained_bytes(self.core, device, self.stepped())
        return budget.with_fresh_gradients(measurement, gradients)

    def with_communication(self, budget: Budget) -> Budget:
        """Return the budget with the bytes of communication between processes, which a later step may increase.

        A DistributedDataParallel around the model is known only inside its forward, and the user may have FSDP keep
        unsharded gradients from any step on (`set_requires_gradient_sync`).
        """
        if not dist.is_initialized() or alone_in_a_prediction():  # a simulated step counts these bytes itself
            return budget
        known = budget.fixed.communication
        if (known or self.alone) and not keeps_gradients(self.core):
            return budget
        return budget.with_communication(max(known, communication_bytes(self.whole)))
