"""What a `Checkpointable` knows about its plan: what was measured, what was solved, and with whom it was agreed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from rotor_profiling import OptimizerCost, UnknownOptimizerError, optimizer_cost
from rotor_py.by_hand.strategy import ByHand
from rotor_py.distributed.processes import around, communication_bytes, processes, size_of
from rotor_py.distributed.shard_groups import at_rest
from rotor_py.distributed.whole_parameters import is_sharded, keeps_gradients
from rotor_py.errors import UnsupportedModelError
from rotor_py.measure.budget import Budget, make_budget
from rotor_py.measure.cut import Cut
from rotor_py.measure.device import limit_bytes
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.planning_lock import planning
from rotor_py.plan.agreement import agreed_sequence, refuse_other_plans
from rotor_py.plan.fingerprint import input_fingerprint, model_fingerprint
from rotor_py.plan.input_spec import TensorSpec
from rotor_py.plan.kinds import Kinds
from rotor_py.plan.model_state import ModelState
from rotor_py.plan.optimizers import noticed_cost
from rotor_py.plan.plan import Plan
from rotor_py.plan.plan_costs import PlanCosts
from rotor_py.report import Report
from rotor_py.stage.graph_effects import recall_effects
from rotor_py.transparent import Transparent, in_training
from rotor_py.units import format_bytes
from rotor_solver import Algorithm, Chain, InfeasibleError, Persistent, Sequence, simulate, store_all
from rotor_solver.kept import PlanMemory, plan_memory

_log = logging.getLogger("rotor_py")


class Planned(Transparent):
    """A model with a plan, or one to come."""

    mem_limit: int | str | None
    mem_slots: int
    verbosity: int
    preserve_rng_state: bool
    loss_tmp_memory_usage: int
    names: list[str]
    functions: list[nn.Module]
    inspection_values: Measurement | None
    chain: Chain | None
    sequence: Sequence | None
    budget: Budget | None
    _core: nn.Module
    _loss: Callable[[Any], torch.Tensor] | None
    _optimizer: torch.optim.Optimizer | None
    _fresh_grads: bool
    _cut: Cut | None
    _value: Any
    _plan: Plan | None
    _by_hand: ByHand | None
    _group: ProcessGroup | None
    _agreed: Sequence | None
    _last_resort: Sequence | None
    _solved_for: tuple[int | str | None, int] | None
    _state: ModelState | None
    _kinds: Kinds

    @property
    def device(self) -> torch.device:
        """The device that the model trains on, and whose memory the limit is about."""
        devices = ModelState.of(self._core).devices | {
            leaf.device for leaf in tree_leaves(self._value) if isinstance(leaf, TensorSpec)
        }
        accelerators = sorted({device for device in devices if device.type != "cpu"}, key=str)
        if len(accelerators) > 1:
            raise UnsupportedModelError(
                f"the model is spread over {', '.join(map(str, accelerators))}; a plan is for one device"
            )
        return accelerators[0] if accelerators else torch.device("cpu")

    def build_chain(self, mem_limit: int | str | None = None) -> Chain:
        """The measured chain, in seconds and bytes; `mem_limit`, if given, becomes the limit of the next plan."""
        if mem_limit is not None:
            self._limit_bytes(mem_limit)
            self.mem_limit = mem_limit
        return self._measured().chain

    def compute_sequence(
        self,
        custom_mem_limit_bytes: int | str | None = None,
        mem_slots: int | None = None,
        algo: Algorithm | None = None,
        **algo_kwargs: Any,
    ) -> Sequence:
        """Find the sequence to train by; `algo` is an algorithm of `rotor_solver` or a class of one.

        Without `algo`, it is that of the strategy set by hand, if there is one.

        InfeasibleError, with the least limit that works as `min_bytes`, if nothing fits.
        """
        budget = self._measured()
        given = self.mem_limit if custom_mem_limit_bytes is None else custom_mem_limit_bytes
        slots = self.mem_slots if mem_slots is None else mem_slots
        group = self._processes()
        with planning:
            if algo is None and self._by_hand is not None:
                limit = None if given is None else self._limit_bytes(given)
                self.sequence = self._by_hand.sequence(self._core, budget, limit)
            else:
                if algo is None:
                    algo = Persistent(slots=slots)
                elif isinstance(algo, type):
                    algo = algo(**algo_kwargs)
                limit = self._limit_bytes(given)
                if group is not None and size_of(group) > 1:
                    self.sequence = agreed_sequence(budget, limit, algo, group, self.device)
                else:
                    self.sequence = budget.solve(limit, algo)
        self._agreed = self.sequence if size_of(group) > 1 else None
        if custom_mem_limit_bytes is not None:
            self.mem_limit = custom_mem_limit_bytes
        self._solved_for = self.mem_limit, self.mem_slots
        if self.verbosity:
            _log.warning("%s", self.summary())
        return self.sequence

    def plan(self) -> Plan:
        """The plan in use, for a file."""
        budget, measurement = self._measured(), self.inspection_values
        sequence = self.compute_sequence() if self.sequence is None else self.sequence
        assert measurement is not None
        if self._plan is not None:
            if sequence == self._plan.sequence and budget == self._plan.costs.budget:
                return self._plan
            return replace(
                self._plan,
                sequence=sequence,
                mem_limit=self._plan.mem_limit if self._unlimited else self._limit_bytes(self.mem_limit),
                peak_bytes=budget.peak_bytes(sequence),
                costs=PlanCosts(measurement, budget),
                limited=not self._unlimited,
            )
        assert self._cut is not None
        self._refuse_another_kind()
        return Plan(
            model=model_fingerprint(self._core),
            input=input_fingerprint(self._value, self.device),
            prefix=[name for name, _ in self._cut.prefix],
            stages=self._cut.groups(),
            traits=[recall_effects(function) for function in self.functions],
            sequence=sequence,
            mem_limit=self._limit_bytes(self.mem_limit),
            peak_bytes=budget.peak_bytes(sequence),
            fresh_grads=self._fresh_grads,
            costs=PlanCosts(measurement, budget),
            limited=not self._unlimited,
        )

    def _refuse_another_kind(self) -> None:
        """ValueError if the model is not as it was when the plan in use was made: the file would say it is for this."""
        with in_training(self):
            if self._state is not None and not ModelState.of(self._core).looks_like(self._state):
                raise ValueError(
                    "the plan in use is for a step in which other parameters were trained, or modes or dtypes were "
                    "others; save it before the model is changed for the next kind of step"
                )

    def save_plan(self, path: str | Path) -> None:
        """Write the plan in use to a file, for `Checkpointable(..., plan=path)`."""
        self.plan().save(path)

    def memory(self) -> PlanMemory:
        """What the plan in use keeps for the backward, and what it does not, stage by stage, when the loss runs."""
        budget, measurement = self._measured(), self.inspection_values
        sequence = self.compute_sequence() if self.sequence is None else self.sequence
        assert measurement is not None
        return plan_memory(budget.chain, sequence, sum(each.nbytes for each in measurement.carried))

    def report(self) -> Report:
        """The plan in use, to be printed, to be shown in a notebook, and to be written as a page (`to_html`).

        ValueError if there is no plan yet and nothing has been measured: before the first step.
        """
        budget, measurement = self._measured(), self.inspection_values
        sequence = self.compute_sequence() if self.sequence is None else self.sequence
        assert measurement is not None
        return Report(
            title=type(self._core).__name__,
            device=str(self.device),
            mem_limit=None if self._unlimited else self._limit_bytes(self.mem_limit),
            budget=budget,
            measurement=measurement,
            sequence=sequence,
        )

    def summary(self) -> str:
        """One line about the plan in use: limit, fixed part, least possible, planned peak and overhead."""
        budget = self._measured()
        sequence = self.compute_sequence() if self.sequence is None else self.sequence
        plain = simulate(budget.chain, store_all(budget.chain))
        planned = simulate(budget.chain, sequence)
        overhead = planned.makespan / plain.makespan - 1 if plain.makespan else 0.0
        limit = "no limit" if self._unlimited else f"limit {format_bytes(self._limit_bytes(self.mem_limit))}"
        return (
            f"{limit}; {budget.split()}; least possible "
            f"{format_bytes(budget.least_bytes())}; predicted peak {format_bytes(budget.peak_bytes(sequence))}, "
            f"{overhead:.1%} more time than storing all ({format_bytes(budget.peak_bytes(store_all(budget.chain)))})"
        )

    def optimizer_noticed(self) -> None:
        """Count the optimizers that train the model, and plan again if the plan in use leaves no room for them.

        A warning is logged if no plan does, or if the plan came from a file: training then goes on with the plan in
        use, beyond the limit.
        """
        cost = noticed_cost(self)
        if cost is None:
            return
        self._kinds.count_optimizer(cost, None if self._by_hand is not None else self._limit_bytes(self.mem_limit))
        if self.budget is None:  # it counts as soon as there is one
            return
        self._count_optimizer(cost)
        if self._by_hand is not None or self._plan is not None:
            return
        if self._agreed is not None:  # the other processes notice theirs, and agree with this one at the next step
            self._last_resort, self.sequence = self.sequence, None
            return
        if self.sequence is None or self.budget.peak_bytes(self.sequence) <= self._limit_bytes(self.mem_limit):
            return
        try:
            self.compute_sequence()
        except InfeasibleError as error:
            self._go_beyond_the_limit(error)

    def _adopt_costs(self, plan: Plan) -> None:
        """Take over what was measured for a plan from a file."""
        self._plan, self.sequence = plan, plan.sequence
        self.inspection_values, self.budget = plan.costs.measurement, plan.costs.budget
        self.chain = self.budget.chain
        if self.mem_limit is None and plan.limited:
            self.mem_limit = plan.mem_limit
        if self._optimizer is not None:
            try:
                self._count_optimizer(optimizer_cost(self._optimizer))
            except UnknownOptimizerError as error:
                _log.warning("%s", error)

    def _count_optimizer(self, cost: OptimizerCost) -> None:
        """A warning is logged where a plan from a file has less room for it than it needs."""
        assert self.budget is not None
        before, self.budget = self.budget, self.budget.with_optimizer(cost)
        if self._plan is None or self._unlimited or self.budget == before:
            return
        peak, limit = self.budget.peak_bytes(self._plan.sequence), self._limit_bytes(self.mem_limit)
        if peak > limit:
            _log.warning(
                "the plan was made for another optimizer, or for none: with this one a step needs %s (%d bytes), and "
                "the limit is %s (%d bytes); training goes on, beyond the limit. Plan again with the optimizer given.",
                format_bytes(peak), peak, format_bytes(limit), limit,
            )  # fmt: skip

    def _go_beyond_the_limit(self, error: InfeasibleError) -> None:
        _log.warning(
            "the optimizer was not known when the model was planned; training goes on, beyond the limit: %s Given as "
            "optimizer=, it counts from the start.",
            error,
        )

    def _agree(self) -> None:
        """Solve, if that has not been done with all processes that train together."""
        budget, group = self.budget, self._processes()
        if self._plan is not None:
            if self._agreed is not self.sequence and group is not None and size_of(group) > 1:
                refuse_other_plans(str(self.sequence), group, self.device)
                self._agreed = self.sequence
            return
        if budget is not None and self._may_need_more(budget):
            needed = communication_bytes(self.model)
            if needed > budget.fixed.communication:
                self.budget, self.sequence = budget.with_communication(needed), None
        if self.sequence is None or (self._agreed is not self.sequence and size_of(group) > 1):
            try:
                self.compute_sequence()
            except InfeasibleError as error:
                if self._last_resort is None:
                    raise
                self._go_beyond_the_limit(error)
                self.sequence = self._agreed = self._last_resort
            self._last_resort = None

    def _may_need_more(self, budget: Budget) -> bool:
        """Whether what processes send to each other is not known yet, or may be more than it was."""
        unknown = not budget.fixed.communication and size_of(self._processes()) > 1
        return unknown or keeps_gradients(self._core)

    def _processes(self) -> ProcessGroup | None:
        """The processes that train this model together, as far as is known."""
        return self._group if self._group is not None else processes(self.model)

    def _measuring(self) -> dict[str, Any]:
        return {
            "preserve_rng_state": self.preserve_rng_state,
            "fresh_gradients": self._fresh_grads,
            "loss_temp_bytes": self.loss_tmp_memory_usage,
        }

    def _account(self, found: Cut, measurement: Measurement, sample: Any) -> None:
        """Take over what was measured; `sample` is all that the caller passes in."""
        cost = optimizer_cost(self._optimizer) if self._optimizer is not None else noticed_cost(self)
        several = is_sharded(self._core) or size_of(self._processes()) > 1
        with at_rest(self._core):
            self.budget = make_budget(
                self._core,
                sample,
                measurement,
                self.device,
                fresh_gradients=self._fresh_grads,
                optimizer=cost,
                communication=communication_bytes(self.model) if several else 0,
                buckets=around(self.model) is not None,
            )
        self.inspection_values, self.chain, self._cut = measurement, self.budget.chain, found
        self._name_stages()

    def _name_stages(self) -> None:
        assert self._cut is not None
        self.names = [name for name, _ in self._cut.stages]
        self.functions = [function for _, function in self._cut.stages]

    @property
    def _unlimited(self) -> bool:
        by_hand = not self._plan.limited if self._plan is not None else self._by_hand is not None
        return by_hand and self.mem_limit is None

    def _measured(self) -> Budget:
        if self.budget is None:
            raise ValueError("nothing has been measured yet; call measure(input), or train one step")
        return self.budget

    def _limit_bytes(self, limit: int | str | None) -> int:
        return limit_bytes(limit, self.device)
