"""The plan for one kind of step: its costs, its sequence, and observations of steps that follow it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rotor_profiling import OptimizerCost
from rotor_py.compile.compiled_stage import CompiledStage
from rotor_py.execute.oom_retry_tape import undo_bytes
from rotor_py.measure.budget import Budget
from rotor_py.measure.cut import Cut
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stage_measurer import MeasuredCut
from rotor_py.plan.saved_plan import Plan
from rotor_py.plan.settings import Settings
from rotor_py.plan.source import Source
from rotor_py.plan.step_spec import (
    StepSpec,
    input_fingerprint,
    model_fingerprint,
    refuse_difference,
    refuse_other_input,
)
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.forward_state import GraphEffects, recall_effects, remember_effects
from rotor_py.units import format_bytes
from rotor_solver import ForwardEnable, Loss, Sequence, store_all

# Maximum number of forms per plan (see `note_form`). A guess: each costs a watched step; skipping layers makes many.
_MOST_FORMS = 32


@dataclass(slots=True)
class StepPlan:
    """The plan for one kind of step. From a file: `spec` is None before the first step, `cut` if it is of a graph."""

    source: Source
    measurement: Measurement
    budget: Budget
    spec: StepSpec | None
    cut: Cut | None
    file: Plan | None = None
    sequence: Sequence | None = None
    agreed: Sequence | None = None  # the last sequence that all processes, training together, have agreed to follow
    # the sequence from before an undeclared optimizer was detected: if no other sequence fits, steps go on with it
    last_resort: Sequence | None = None
    solved_with: tuple[float | str | None, int] | None = None  # `Settings.solved_with` when the sequence was found
    found: Sequence | None = None  # the sequence that the last solve found; if `sequence` differs, the user has set it
    most_in_flight: int = 1  # largest number of forwards in flight at once of which one followed this plan
    in_reverse: int = 0  # number of steps, with the planned number in flight, whose last forward went backward first
    in_other_order: bool = False  # whether a forward has gone backward while a later one was in flight
    fresh_gradients: bool = False  # whether gradients are freed between steps
    watched: Sequence | None = None  # the sequence of the last step that was watched to its end
    # whether the first watched step has confirmed the prediction; None before that step, or without a prediction
    prediction_holds: bool | None = None
    asked: int = 0  # number of forwards in which processes could tell each other whether the prediction holds
    overruns: int = 0  # number of watched steps that exceeded the limit
    # names of stages to store from now on: a step could not recompute them, or had create_graph=True go through them
    changed: set[str] = field(default_factory=set)
    told_bytes: int = 0  # bytes of the largest peak that a warning has named
    steps: int = 0  # number of forwards by this plan that began with no other in flight
    forms: set[tuple[object, ...]] = field(default_factory=set)  # forms of its steps so far (see `note_form`)
    # `mem_limit` when the device ran out of memory, and the lower limit, in bytes, that steps keep since then
    reduced: tuple[float | str | None, int] | None = None
    # measured variants of its stages (some, all or none compiled), of which `cut` is one; empty without `compile`
    ways: tuple[MeasuredCut, ...] = ()
    # whether the graph was compiled as one stage for more bytes than the last solve had for it
    compiled_for_larger_budget: bool = False
    # bytes of copies that restore a stage after an out-of-memory error (`oom_replanning.guarded`); None without copies
    guard_bytes: int | None = None
    _effects: tuple[GraphEffects, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._effects = tuple(recall_effects(function) for function in self.functions)

    @classmethod
    def adopted(cls, file: Plan, source: Source) -> StepPlan:
        """Return a step plan with the costs and sequence of a file. PlanMismatchError if the file's layers differ."""
        plan = cls(source, file.costs.measurement, file.costs.budget, None, source.adopt(file), file, file.sequence)
        plan.fresh_gradients = file.fresh_grads
        return plan

    def compare_with_file(self, spec: StepSpec, value: Any, model: TrainedModel) -> None:
        """Raise PlanMismatchError if model or input differ from the file's. Compares only what has changed."""
        assert self.file is not None
        known = self.spec
        if known is None or known.model != spec.model:
            refuse_difference(self.file.model, model_fingerprint(model.core))
            self.cut = self.source.adopt(self.file)
        if known is None or not self.source.covers(known.input, value):
            refuse_other_input(self.file.input, input_fingerprint(value, model.device_of(spec.input)))
            known = spec
        self.spec = StepSpec(spec.model, known.input)

    @property
    def followed(self) -> Sequence:
        """The sequence that steps by this plan follow, once the plan has been solved."""
        assert self.sequence is not None
        return self.sequence

    @property
    def functions(self) -> list[nn.Module]:
        return [] if self.cut is None else [function for _, function in self.cut.stages]

    @property
    def compiled(self) -> list[str]:
        if self.cut is not None:
            return [name for name, function in self.cut.stages if isinstance(function, CompiledStage)]
        return [] if self.file is None or self.file.compiled is None else self.file.compiled.stages

    @property
    def input_spec(self) -> Any:
        return None if self.spec is None else self.spec.input

    def note_form(self, form: tuple[object, ...]) -> None:
        """Have the next step watched if no step had this `form` before, as in a new phase of training. A form holds the
        numbers of autograd nodes and backward passes of a step, and whether each pass retained or created a graph.
        """
        if form not in self.forms and len(self.forms) < _MOST_FORMS:
            self.forms.add(form)
            self.watched = None

    def unlimited(self, settings: Settings) -> bool:
        """Whether steps have no limit: the user gave none, and a strategy by hand, which needs none, made the plan."""
        by_hand = settings.by_hand is not None if self.file is None else not self.file.limited
        return by_hand and settings.mem_limit is None

    def found_for(self, settings: Settings) -> bool:
        """Whether a solver found the plan's sequence; False if it is by hand, from a file, or set by the user."""
        return self.file is None and settings.by_hand is None and self.sequence is self.found

    def why_it_stays(self, model: TrainedModel) -> str | None:
        """Return a sentence that says why the plan stays, though a step exceeded the limit; None if it may change."""
        if self.file is not None:
            return "The plan is from a file, and stays as it is: training goes on, beyond the limit."
        if model.settings.by_hand is not None:
            return "The checkpoints are set by hand, and stay as they are: training goes on, beyond the limit."
        if not model.alone:
            # To solve again needs all processes. Those in which no step exceeded the limit would not take part.
            return "Other processes follow the same plan, so it stays as it is: training goes on, beyond the limit."
        return None

    def is_for(self, spec: StepSpec) -> bool:
        """Whether the plan was measured for this kind of step; False if it is from a file (see `compare_with_file`)."""
        texts = not self.source.captured
        return self.file is None and self.spec is not None and self.spec.same_step(spec, texts=texts)

    def restore_effects(self) -> None:
        # Effects are remembered per layer, and plans share layers: measuring for another plan may have replaced them.
        for function, effects in zip(self.functions, self._effects, strict=True):
            remember_effects(function, effects)

    def count_optimizer(self, cost: OptimizerCost | None) -> None:
        if cost is not None:
            fixed = replace(self.budget.fixed, optimizer=cost.state_bytes)
            self.budget = replace(self.budget, fixed=fixed, step_bytes=cost.step_bytes)

    def budget_of(self, way: MeasuredCut) -> Budget:
        """Return the budget of a step that runs this variant of the stages."""
        found = self._measurement_of(way)
        budget = self.budget.with_found(found, 0, fresh_gradients=self.fresh_gradients)
        if self.guard_bytes is None:
            return replace(budget, snapshot_bytes=found.snapshot_bytes)
        buffers = budget.fixed.buffers + _guard_bytes(way) - self.guard_bytes
        return replace(budget, fixed=replace(budget.fixed, buffers=buffers))

    def budgets(self) -> list[tuple[Budget, Measurement]]:
        found = [(self.budget_of(way), self._measurement_of(way)) for way in self.ways]
        return found or [(self.budget, self.measurement)]

    def turn_to(self, way: MeasuredCut) -> None:
        """Have forwards run this variant of the stages from now on."""
        if self.cut is way.cut:
            return
        self.budget, self.measurement, self.cut = self.budget_of(way), self._measurement_of(way), way.cut
        if self.guard_bytes is not None:
            self.guard_bytes = _guard_bytes(way)
        self.source.follow(way.cut)
        self._effects = tuple(recall_effects(function) for function in self.functions)

    def stored_by(self, sequence: Sequence) -> set[str]:
        """Return the names of the stages that run graph-attached when they first run in `sequence`."""
        # From last to first, so that a stage's first operation decides.
        first = {each.stage: each for each in reversed(sequence) if not isinstance(each, Loss)}
        return {self.measurement.names[stage] for stage, each in first.items() if isinstance(each, ForwardEnable)}

    def store_changed(self, settings: Settings) -> None:
        """Have the next solve store the stages in `changed`, unless a file, a strategy by hand or the user decides."""
        names, self.changed = self.changed, set()
        stages = {i for i, name in enumerate(self.measurement.names) if name in names}
        unrepeatable = tuple(sorted(stages.union(self.measurement.unrepeatable)))
        if self.found_for(settings) and not self.ways and unrepeatable != self.measurement.unrepeatable:
            self.measurement = replace(self.measurement, unrepeatable=unrepeatable)
            self.budget = self.budget.with_found(self.measurement, 0, fresh_gradients=self.fresh_gradients)
            if self.sequence is not None and not names <= self.stored_by(self.sequence):
                self.sequence = None

    @contextmanager
    def without_budget(self) -> Iterator[None]:
        """Inside the context, compiled stages save the tensors that the compiler chooses without a limit.

        Does nothing for a captured model's plan from a file, whose stages are compiled at the model's first step.
        """
        if self.cut is None:
            yield
            return
        stages = tuple(
            (name, stage.with_ways(()) if isinstance(stage, CompiledStage) and stage.room is not None else stage)
            for name, stage in self.cut.stages
        )
        self.source.follow(replace(self.cut, stages=stages))
        try:
            yield
        finally:
            self.source.follow(self.cut)

    def summary(self, model: TrainedModel) -> str:
        """Return one line of text: limit, fixed memory, least limit, peak, and time beyond that of storing all."""
        budget, sequence, stored = self.budget, self.followed, store_all(self.budget.chain)
        plain, planned = budget.makespan(stored), budget.makespan(sequence)
        overhead = planned / plain - 1 if plain else 0.0
        compiled, moved = len(self.compiled), budget.moved_in_words(sequence)
        limit = "no limit"
        if not self.unlimited(model.settings):
            limit = f"limit {format_bytes(model.limit_bytes(model.device_of(self.input_spec)))}"
        return (
            f"{limit}; {budget.split()}; least possible "
            f"{format_bytes(budget.least_bytes())}; predicted peak {format_bytes(budget.peak_bytes(sequence))}, "
            f"{overhead:.1%} more time than storing all ({format_bytes(budget.peak_bytes(stored))})"
            + (f"; {moved}" if moved else "")
            + (f"; {compiled} of {len(self.measurement.names)} stages compiled" if compiled else "")
        )

    def _measurement_of(self, way: MeasuredCut) -> Measurement:
        now = self.measurement
        return replace(way.measurement, loss=now.loss, outputs_held=now.outputs_held, output_held=now.output_held)

    def solve_again(self) -> None:
        # If two optimizers are detected before the next forward, keep `last_resort` of the first: the second finds no
        # sequence to put there.
        if self.sequence is not None:
            self.last_resort, self.sequence = self.sequence, None


def _guard_bytes(way: MeasuredCut) -> int:
    return way.measurement.snapshot_bytes + undo_bytes(function for _, function in way.cut.stages)
