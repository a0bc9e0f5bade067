"""Track forwards in flight: those whose backward is still to come while another forward begins.

A plan leaves room for as many as the user declared or an earlier step had. One more may follow another sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch.autograd.graph import get_gradient_edge

from rotor_profiling import torch_compat
from rotor_py.errors import record_fields
from rotor_py.execute.backward_passes import current_task, goes_through, retains_graph
from rotor_py.measure.budget import Budget
from rotor_py.plan.solving import solve
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.saved_tensors import hook_gradients
from rotor_py.units import exact_bytes
from rotor_solver import Chain, InfeasibleError, Persistent, Sequence
from rotor_solver.in_flight import Footprint, with_room_at_loss

T = TypeVar("T")
_log = logging.getLogger("rotor_py")

# Number of steps with backwards in reverse after which plans assume that order. A guess: after fewer, more may differ.
_ENOUGH = 3
_MOST_KNOWN = 64  # Number of budgets, footprints and sequences to cache. A guess: steps of one model use fewer.


@dataclass(eq=False)
class ForwardInFlight:
    """One forward, for as long as a backward through it is possible. Only its graph keeps it alive."""

    plan: StepPlan
    sequence: Sequence
    used: bool = False  # whether its last backward pass frees its graph
    counted: bool = False  # whether a backward pass through it has been counted in the order of backwards
    nodes: tuple[int, int] = (0, 0)  # numbers of autograd nodes that this thread had made before and after the forward
    passes: tuple[int, ...] = ()  # the backward passes that have gone through it, by number


class Forwards:
    def __init__(self) -> None:
        self._flying: list[ref[ForwardInFlight]] = []
        self._remembered: dict[Hashable, tuple[object, Any]] = {}
        self._warned = 0  # the largest number of forwards in flight that a warning has named
        self._knows_split = False  # whether a backward has computed gradients of inputs only, not of parameters

    def in_flight(self) -> list[ForwardInFlight]:
        """Return the forwards whose graph exists, unless a backward pass that frees the graph has reached them."""
        found = [forward for each in self._flying if (forward := each()) is not None and not forward.used]
        self._flying = [ref(each) for each in found]
        return found

    def forward_returned(
        self, plan: StepPlan, sequence: Sequence, model: TrainedModel, output: Any, began: int | None = None
    ) -> None:
        """Count a returned forward as in flight. `began`: number of autograd nodes that this thread made before it."""
        returned = torch_compat.get_sequence_nr()
        flying = ForwardInFlight(plan, sequence, nodes=(returned if began is None else began, returned))
        hook_gradients(output, partial(self._begin_backward, flying, model))  # if the graph is freed, `flying` is
        self._flying.append(ref(flying))

    def _begin_backward(self, forward: ForwardInFlight, model: TrainedModel, gradient: torch.Tensor) -> None:
        model.note_planned()
        if current_task() not in forward.passes:
            forward.passes += (current_task(),)
            # In a new phase of training, a step has other numbers of nodes in model or loss, other passes or modes.
            (began, returned), now = forward.nodes, torch_compat.get_sequence_nr()
            made = returned - began, now - returned
            if torch.is_grad_enabled():  # create_graph=True: later plans must store these stages, too
                forward.plan.changed |= forward.plan.stored_by(forward.sequence)
            forward.plan.note_form((*made, len(forward.passes), retains_graph(), torch.is_grad_enabled()))
        if not (forward.used or forward.counted):
            forward.counted, flying = True, self.in_flight()
            if flying[-1] is forward:
                forward.plan.in_reverse += len(flying) == forward.plan.budget.forwards > 1
            else:
                for each in flying:
                    if each.plan.budget.backward_order == "reverse" and not each.plan.in_other_order:
                        self._warn_of_order(flying, each.plan, model)
                    each.plan.in_other_order = True
        forward.used = not retains_graph()  # a retained graph keeps its tensors, so the forward stays in flight
        if forward.used or self._knows_split:
            return
        trained = [parameter for parameter in model.core.parameters() if parameter.requires_grad]
        with torch.enable_grad():  # in older releases of torch, `get_gradient_edge` makes a view of a leaf
            for_inputs = trained and not any(goes_through(get_gradient_edge(each).node) for each in trained)
        if for_inputs:
            self._knows_split = True
            self._warn_of_split_backwards(forward, model)

    def _warn_of_order(self, flying: list[ForwardInFlight], plan: StepPlan, model: TrainedModel) -> None:
        if plan.unlimited(model.settings):
            return
        budget = replace(self._budget(plan, model, len(flying)), backward_order="any")
        peak = budget.bytes_together([self._footprint(each.plan, each.sequence, model) for each in flying])
        limit = model.limit_bytes(model.device_of(plan.input_spec))
        if peak <= limit:
            return
        stays = plan.file is not None or not model.alone
        _log.warning(
            f"set backward_order='any' (--backward-order any): the plan assumes that the last of {len(flying)} "
            f"forwards of {model.name} in flight goes backward first, but another one did. The step takes up to "
            f"{exact_bytes(peak)}, and the limit is {exact_bytes(limit)}. "
            f"{'The plan stays as it is' if stays else 'From the next step on, the plan allows any order'}.",
            extra=record_fields("other_backward_order", forwards=len(flying), peak_bytes=peak, mem_limit=limit),
        )

    def _warn_of_split_backwards(self, forward: ForwardInFlight, model: TrainedModel) -> None:
        plan = forward.plan
        if plan.unlimited(model.settings):
            return
        held = self._footprint(plan, forward.sequence, model).waiting
        limit = model.limit_bytes(model.device_of(plan.input_spec))
        between = sum(plan.budget.chain.activation[1:])  # bytes of the gradients of all stages' outputs
        peak = plan.budget.peak_bytes(plan.sequence or forward.sequence) + held + between
        if peak <= limit:
            return
        _log.warning(
            "%s has one backward for inputs and a later one for weights. In between, %s of activations and up to %s of "
            "gradients stay: the step may need %s, and the limit is %s. Use a smaller batch; or, in a pipeline, pass "
            "dw_builder=rotor_py.distributed.pipelining.whole_backward to PipelineStage, so that none of them stay.",
            model.name,
            *map(exact_bytes, (held, between, peak, limit)),
            extra=record_fields("split_backwards", peak_bytes=peak, mem_limit=limit),
        )

    def held_bytes(self, model: TrainedModel) -> int:
        return sum(self._footprint(each.plan, each.sequence, model).waiting for each in self.in_flight())

    def sequence_beside(self, flying: list[ForwardInFlight], plan: StepPlan, model: TrainedModel) -> Sequence:
        """Return the sequence for one more forward: the plan's, or another if only that fits; warn if none does."""
        if not flying:
            return plan.followed
        count = len(flying) + 1
        planned = plan.followed.of_forwards(count)[-1]
        for each in (plan, *(forward.plan for forward in flying)):
            each.most_in_flight = max(each.most_in_flight, count)
        if plan.unlimited(model.settings):
            return planned
        limit = model.limit_bytes(model.device_of(plan.input_spec))
        budget = self._budget(plan, model, count)
        others = [self._footprint(forward.plan, forward.sequence, model) for forward in flying]
        held, working = sum(each.waiting for each in others), max(each.working for each in others)
        running = budget.bytes_together([*others, self._footprint(plan, planned, model)])
        peak = max(running, budget.optimizer_peak_bytes)
        if peak <= limit:
            return planned
        # With several processes, keep the sequence: all follow the same one, and none knows the others' forwards.
        if running > limit and model.alone and plan.found_for(model.settings):
            rest = limit - budget.fixed.total - held - budget.held_beside - budget.snapshot_bytes
            squeezed = self._squeezed(budget.chain, rest, working)
            if squeezed is not None:
                return squeezed
        if count > max(self._warned, plan.budget.forwards):  # warn once of each number above the planned one
            self._warned = count
            _log.warning(
                f"Say forwards_in_flight={count} (--forwards-in-flight {count}), and the plan counts them all, or call "
                f"backward() after each forward of {model.name}: {count - 1} forwards in flight hold "
                f"{exact_bytes(held)}, so the step takes up to {exact_bytes(peak)}; the limit is {exact_bytes(limit)}",
                extra=record_fields("forwards_over_limit", forwards=count, peak_bytes=peak, mem_limit=limit),
            )
        return planned

    def _budget(self, plan: StepPlan, model: TrainedModel, count: int) -> Budget:
        make = partial(model.with_forwards, plan.budget, plan.measurement, model.device_of(plan.input_spec), count)
        return self._remember(("budget", id(plan.budget), count), plan.budget, make)

    def _footprint(self, plan: StepPlan, sequence: Sequence, model: TrainedModel) -> Footprint:
        # Use a budget for two forwards: that for one omits the bytes that a waiting one holds outside the chain.
        budget = self._budget(plan, model, 2)
        key = "footprint", id(budget), id(sequence)
        return self._remember(key, (budget, sequence), partial(budget.footprint, sequence))

    def _squeezed(self, chain: Chain, rest: int, working: int) -> Sequence | None:
        """Return the fastest sequence within `rest` bytes that leaves `working` bytes free in the loss; else None."""

        def solve() -> Sequence | None:
            try:
                return Persistent().solve(with_room_at_loss(chain, working), max(0, rest))
            except InfeasibleError:
                return None

        return self._remember(("squeezed", id(chain), rest, working), chain, solve)

    def _remember(self, key: Hashable, of: object, make: Callable[[], T]) -> T:
        if key not in self._remembered:
            if len(self._remembered) == _MOST_KNOWN:
                self._remembered.clear()
            self._remembered[key] = of, make()  # `of` holds the objects whose ids are in the key
        return cast(T, self._remembered[key][1])


def make_room_for_forwards(plan: StepPlan, model: TrainedModel) -> None:
    order = model.settings.backward_order or "any"
    if model.settings.backward_order is None and model.settings.watch is not False and plan.in_reverse >= _ENOUGH:
        order = "reverse"
    if plan.in_other_order:
        order = "any"
    more = plan.most_in_flight > plan.budget.forwards
    if not (more or order != plan.budget.backward_order) or not model.alone or not plan.found_for(model.settings):
        return
    device = model.device_of(plan.input_spec)
    plan.budget = model.with_forwards(plan.budget, plan.measurement, device, plan.most_in_flight)
    sooner = order == "reverse" and plan.budget.forwards > 1 and plan.budget.backward_order != order
    plan.budget = replace(plan.budget, backward_order=order)
    # Keep a plan that still fits, unless its backwards now come in reverse, for which a faster plan may exist.
    if plan.budget.peak_bytes(plan.followed) <= model.limit_bytes(device) and not sooner:
        return
    forwards, before = plan.budget.forwards, plan.sequence
    if more:
        _log.warning(
            f"planning again for {forwards} forwards of {model.name} in flight at once; give "
            f"forwards_in_flight={forwards} to plan for them from the first step on",
            extra=record_fields("planning_again", cause="forwards", forwards=forwards),
        )
    try:
        solve(plan, model)
    except InfeasibleError as error:
        _log.warning(
            f"with {forwards} forwards in flight, training goes on beyond the limit: {error}",
            extra=record_fields("forwards_over_limit", forwards=forwards),
        )
        return
    if sooner and not more and model.settings.backward_order is None and plan.sequence != before:
        _log.warning(
            f"planned again: the backwards of {model.name} come in the reverse order of its {forwards} forwards in "
            "flight; give backward_order='reverse' to have this faster plan from the first step on",
            extra=record_fields("planned_again", forwards=forwards),
        )
