"""Plan the steps of a model: the events in the life of a plan, and their effects.

# Note [The life of a plan]
#
# The step plan in use is measured (it has costs), solved (it has a sequence, too), or agreed (all processes that train
# together follow that sequence). Without a plan, the planner is unmeasured. "Training goes on" means: steps may exceed
# the limit, and a warning says so. Events 6, 7 and 9 never replace a sequence by hand or from a file.
# Events:
#
#  1. Measure. The planner drops its plan for steps of this kind and any plan from a file, and cuts and measures the
#     stages. Plans for other kinds of steps wait. → measured. An error restores the earlier plans.
#  2. Solve. The planner finds a sequence for the limit. → solved; or agreed, with several processes: these solve
#     together, so all of them have to reach this point. A strategy by hand finds the same one in each process.
#  3. The user sets a sequence. The planner follows it, whatever memory it takes. → solved. Several processes do not
#     follow it, since they have not agreed on it: they solve together at the next forward.
#  4. The user sets a limit. It counts from the next solve on: the plan in use stays.
#  5. A forward arrives. It follows the plan in use if that covers its kind of step and input size; else a waiting plan
#     that does, solved again if the limit has changed or other steps left gradients; else the planner measures and
#     solves (events 1 and 2). A captured model may then run another graph than the measured one; the forward is undone,
#     measured and run once more, or goes on unplanned where it cannot be undone (`session.py`). If the batch's data,
#     such as padding, cause this, it is another kind of step, and a waiting plan may cover it. On any error, the
#     earlier plans stay. If no plan fits an input, later inputs at least as large are refused without measuring, unless
#     a batch with another mask may need less. Several processes refuse an input that no plan covers, since each would
#     plan alone. After many plans for ever larger inputs, one warning asks to measure the largest.
#  6. An optimizer is detected. Its state counts in every budget. If this takes a plan over the limit, the planner
#     solves again; if no plan fits, training goes on. Several processes solve together, at the next forward.
#  7. A step shows undeclared memory (`observers`). If gradients exist when a forward begins, despite `fresh_grads`, and
#     do not fit, the planner measures and solves with them (events 1 and 2). Memory outside the model, such as the
#     loss's, shows when a watched step is over. If it does not fit, the planner solves again, once for each plan, and
#     logs a warning; if no plan fits, or with several processes, training goes on. If an optimizer steps without a
#     planned forward since its last step, one warning says so.
#  8. The planner adopts a plan file, with costs and sequence, if it was made for a model like this. → solved. The first
#     forward compares model and input with the file, as does one after a change of the model or on a larger input;
#     processes compare their sequences. → agreed. If the costs were predicted, the first watched step is compared with
#     them; if its peak differs by more than a margin in any process, the next forward drops the file and measures
#     (events 1 and 2).
#  9. A forward arrives while others are in flight. It follows the plan's sequence for that many forwards; if this does
#     not fit, another sequence that fits; if none fits, training goes on. Once no forward is in flight, the planner
#     solves for as many forwards as there were; if no plan fits, training goes on. Plans allow backwards in any order.
#     If three steps had their backwards in reverse, the planner solves for that order, unless the user has declared
#     one; after a step in another order, for any order again. With several processes, it only warns.
# 10. The device runs out of memory in a planned forward or backward, with `on_oom="replan"`. The planner finds a
#     sequence within a smaller limit, and repeats the failed work by it. Steps of this kind keep the smaller limit
#     until the user sets one. → solved
# 11. The model is copied. The copy gets the plan in use, unless it is for a captured graph, and no waiting plans.
# 12. The user calls `.compile()`. The planner drops all plans, since compiled stages cost other bytes and times. →
#     unmeasured. A plan from a file stays, and a warning says so.
#
# The caller puts the model in training mode for events 1 and 5, and when a plan is written to a file. In all threads of
# a process, one planner at a time measures or solves (`planning_lock`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rotor_profiling import UnknownOptimizerError, tensors_in, torch_compat
from rotor_profiling.contents import with_own_containers
from rotor_profiling.isolate import set_meanwhile, undoing
from rotor_py.compile.stage_code import Compile, config_of
from rotor_py.errors import (
    InvalidValueError,
    OtherDataError,
    PlanMismatchError,
    UnsupportedModelError,
    fields_of,
    record_fields,
)
from rotor_py.execute.backward_passes import current_task
from rotor_py.measure.device import limit_bytes
from rotor_py.plan.observers.forwards_in_flight import ForwardInFlight, Forwards
from rotor_py.plan.observers.outer_checkpoint_regions import NestedRecompute, outer_regions_aside
from rotor_py.plan.observers.undeclared_memory import KeptGradients, wait_for_optimizers
from rotor_py.plan.observers.watched_steps import WatchedSteps
from rotor_py.plan.oom_replanning import Replanner, guarded
from rotor_py.plan.saved_plan import Plan, config_beside
from rotor_py.plan.settings import Settings, one_process_only, refuse_excluded
from rotor_py.plan.solving import count_optimizer_beside_file, solve
from rotor_py.plan.source import Following
from rotor_py.plan.step_in_backward import Stepper
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.step_plans import StepPlans, agree
from rotor_py.plan.step_spec import StepSpec, describe, model_fingerprint, refuse_difference
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.saved_tensors import innermost_hooks
from rotor_solver import DescribedError, InfeasibleError, Sequence

_log = logging.getLogger("rotor_py")

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _is_lazy(model: nn.Module) -> bool:
    return any(map(is_lazy, (*model.parameters(), *model.buffers())))


class Planner:
    """Plans and runs the forwards of `whole`, the module that users call; its part `core` is cut into stages."""

    def __init__(self, whole: nn.Module, core: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self.model = TrainedModel(whole, core, settings)
        self.plans = StepPlans(self.model)
        self._told: set[object] = set()  # `kind` of each warning already logged
        self._lazy = _is_lazy(core)
        self._one_process_only = settings.offload is not None or one_process_only(settings) is not None
        self._forwards = Forwards()
        self._watched = WatchedSteps(self.model)
        self._gradients = KeptGradients(self.plans)
        self._second_runs = NestedRecompute()
        self._stepper: Stepper | None = None
        self.wait_for_optimizers()

    def wait_for_optimizers(self) -> None:
        """From now on, detect optimizers that train the model (event 6) or step without a planned forward (event 7)."""
        wait_for_optimizers(self.plans, self._watched)
        if self.settings.step_in_backward is not None:
            self._stepper = Stepper(self.model, self.settings.step_in_backward)

    @property
    def in_use(self) -> StepPlan:
        """The plan that steps follow. Raises ValueError if nothing has been measured."""
        if self.plans.in_use is None:
            text = "nothing has been measured yet; call measure(input), or train one step"
            raise InvalidValueError(text, kind="not_measured")
        return self.plans.in_use

    @property
    def device(self) -> torch.device:
        return self.model.device_of(None if self.plans.in_use is None else self.plans.in_use.input_spec)

    def measure(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, closely: bool = False) -> None:
        """Event 1: cut the model into stages and measure them on these arguments; `closely` for more precise times."""
        with self.plans.kept_on_error():
            value = self._input_of(args, kwargs)
            self.plans.measure(StepSpec.of(self.model.core, value), value, closely=closely)

    def refuse_what_cannot_fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise InfeasibleError if parameters, gradients, optimizer state and these arguments exceed the limit."""
        value = self._input_of(args, kwargs)
        self.plans.refuse_what_cannot_fit(StepSpec.of(self.model.core, value), value)

    def solved(self) -> StepPlan:
        if self.in_use.sequence is None:
            solve(self.in_use, self.model)
        return self.in_use

    def set_limit(self, limit: float | str) -> None:
        """Event 4: set the limit for the next solve. Raises ValueError if it is invalid."""
        limit_bytes(limit, self.device)  # validated before it is set
        self.settings.mem_limit = limit

    def adopt(self, file: Plan) -> None:
        """Event 8: follow a plan from a file. PlanMismatchError if its model, `keep`, `compile` or optimizer differ."""
        refuse_difference(file.model, model_fingerprint(self.model.core))
        file.refuse_other_steps(self.model.stepping())
        if (asked := file.costs.measurement.fewer_bits) not in (None, self.settings.keep):
            raise PlanMismatchError("keep=", repr(asked), repr(self.settings.keep))
        budget, offload = file.costs.budget, self.settings.offload
        if file.sequence.moves is None and offload is not None:
            extra = record_fields("moves_nothing", name=offload)
            _log.warning("the plan from the file offloads nothing, so offload=%r has no effect", offload, extra=extra)
        if file.sequence.moves is not None and offload is None:
            text = f"give offload= here as well: the plan offloads activations (it was made with {budget.link_name!r})"
            raise InvalidValueError(text, kind="no_tier", name="offload")
        self.model.reserve(budget, file.sequence)
        if (config := config_beside(file.compiled, self.settings.inductor)) != self.settings.inductor:
            self.settings.inductor = config
            self.plans.begin_anew()
        plan = StepPlan.adopted(file, self.plans.blank)
        self.plans.in_use = guarded(plan) if self.settings.on_oom == "replan" else plan
        if self.settings.mem_limit is None and file.limited:
            self.settings.mem_limit = file.mem_limit
        if self.settings.optimizer is not None:
            try:
                count_optimizer_beside_file(self.in_use, self.model)
            except UnknownOptimizerError as error:
                _log.warning("%s", error, extra=fields_of(error))

    def compile_with(self, compile: Compile) -> None:
        """Event 12: drop all plans, and have later ones compile the stages. With a plan from a file, only warn."""
        refuse_excluded(self.settings, compile="compile()")
        if self.plans.in_use is not None and self.plans.in_use.file is not None:
            extra = record_fields("compile_ignored", name="plan")
            _log.warning("compile() has no effect, since steps follow the plan from a file", extra=extra)
            return
        self.settings.inductor = config_of(compile)
        self.plans.begin_anew()

    def warn_once(self, text: str, extra: dict[str, object]) -> None:
        """Log a warning, unless one of the same `kind` has been logged."""
        if extra["kind"] not in self._told:
            self._told.add(extra["kind"])
            _log.warning(text, extra=extra)

    def copied(self) -> Planner:
        """Event 11: return a planner for a copy. It refers to this model until `copy` or `pickle` copies it, too."""
        twin = Planner(self.model.whole, self.model.core, replace(self.settings))
        twin.plans.take_along(self.plans.in_use)
        return twin

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Event 5: run the model forward, so that its backward follows a plan; without a plan if nothing trains."""
        if torch_compat.maybe_current_level() is not None:
            text = (
                "call the attribute `model` inside torch.func transforms (grad, vmap, ...): no plan works inside them"
            )
            raise UnsupportedModelError(text, kind="function_transform")
        if innermost_hooks(True) is None and not torch_compat.dispatch_mode_stack():  # no region, as in most steps
            return self._run(args, kwargs, second=False)
        with outer_regions_aside() as second:
            return self._run(args, kwargs, second=second)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, second: bool) -> Any:
        """Run a forward by plan. `second`: whether the caller's checkpoint region recomputes it, unobserved."""
        model, stepper = self.model, None if second else self._stepper
        model.note_planned()
        if stepper is not None:
            stepper.remove_consumed()
        value = self._input_of(args, kwargs)
        spec = StepSpec.of(model.core, value)
        if True not in spec.model.trained and not any(tensor.requires_grad for tensor in tensors_in(value)):
            return model.core.forward(*args, **kwargs)
        if self._one_process_only:
            model.refuse_several_processes()
        flying = self._forwards.in_flight()
        if stepper is not None and stepper.before_forward(in_flight=bool(flying)):
            if (plan := self.plans.in_use) is not None and plan.file is not None:
                plan.file.refuse_other_steps(model.stepping())
            self.plans.begin_anew()  # the optimizer now has other parameters than those that the plans know
        with self._own_errors(args, kwargs):
            self.plans.make_ready(spec, value, in_flight=second or bool(flying))
        # With forwards in flight, or in a backward (of a reentrant region), existing gradients may be this step's own.
        if spec.model.has_gradients and not (second or flying or current_task() != -1):
            self._gradients.notice(self.in_use, value)
        by_plan = self._run_second if second else self._run_planned
        try:
            return by_plan(value, flying)
        except PlanMismatchError as error:
            if self.in_use.file is not None or not self.plans.blank.captured:
                raise
            answers = error.answers if isinstance(error, OtherDataError) else None
        # Try again after the `except` block: inside it, the error's traceback would hold the first attempt's tensors.
        if answers is not None:
            if not model.alone:  # the batches of the other processes may fit, so they would not plan anew
                text = "call measure() again in all processes: the plan is for batches with another kind of mask"
                raise UnsupportedModelError(text, kind="no_plan_for_input", name="mask")
            spec = replace(StepSpec.of(model.core, value), answers=answers)
            with self._own_errors(args, kwargs):
                self.plans.make_ready(spec, value, in_flight=bool(self._forwards.in_flight()))
            with suppress(PlanMismatchError):  # the graph may differ because of the batch's shape, too
                return by_plan(value, self._forwards.in_flight())
        return self._run_other_way(value, by_plan, self._own_errors(args, kwargs))

    def _input_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a forward as one value. At the first call, have lazy layers make their parameters."""
        core = self.model.core
        if self._lazy and _is_lazy(core):
            if any(isinstance(module, _DROPOUT) and module.p for module in core.modules()):
                _log.warning(
                    f"run {self.model.name} once on a batch before you wrap it: it has lazy layers, whose parameters "
                    "are made before the first forward, and dropout, so both draw other random numbers than in plain "
                    "training",
                    extra=record_fields("lazy_layers", name=self.model.name),
                )
            evaluation = [(each, {"training": False}) for each in core.modules()]  # no dropout, no running statistics
            with set_meanwhile(*evaluation), torch.no_grad():
                core(*with_own_containers(args), **with_own_containers(kwargs))
        self._lazy = False
        return self.plans.blank.input_of(args, kwargs)

    @contextmanager
    def _own_errors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """If the model raises an error of its own while it is measured, run it without a plan until it raises it again:
        measuring restores all state, and plain training would leave what the forward had changed before the error.
        """
        try:
            yield
        except (DescribedError, torch.OutOfMemoryError):
            raise
        except Exception:
            self.model.core.forward(*args, **kwargs)
            raise

    def _run_other_way(self, value: Any, by_plan: Callable[..., Any], own_errors: AbstractContextManager[None]) -> Any:
        """Run a forward whose graph differs from that of the plan in use: by a waiting plan, or else by a new one."""
        answers = self.in_use.source.answers  # the shape, not the data, has changed the graph
        spec = replace(StepSpec.of(self.model.core, value), answers=answers)
        for plan in self.plans.for_other_graphs(spec):
            try:
                agree(plan, self.model)
                return by_plan(value, self._forwards.in_flight())
            except (InfeasibleError, PlanMismatchError):
                continue
        known = self.in_use.input_spec
        if not self.model.alone and not self.plans.blank.covers(spec.input, known):
            both = f"{describe(known)} and {describe(spec.input)}"
            text = f"call measure() in all processes with both inputs, which have different graphs: {both}"
            raise UnsupportedModelError(text, kind="no_plan_for_input", name="graph")
        with own_errors:
            self.plans.plan_for(spec, value)
        return by_plan(value, self._forwards.in_flight(), goes_on=True)  # unplanned if the graph differs once more

    def _run_planned(self, value: Any, flying: list[ForwardInFlight], *, goes_on: bool = False) -> Any:
        plan = self.in_use
        sequence = self._forwards.sequence_beside(flying, plan, self.model)
        self._watched.forward_begins(plan, value, len(flying))
        began = torch_compat.get_sequence_nr()
        try:
            output = self._follow(sequence, plan, value, len(flying) + 1, goes_on=goes_on)
        except BaseException:
            self._watched.forward_failed()
            raise
        self._watched.forward_returned(output)
        self._forwards.forward_returned(plan, sequence, self.model, output, began)
        if self._stepper is not None:
            self._stepper.forward_returned(output)
        return output

    def _run_second(self, value: Any, flying: list[ForwardInFlight], *, goes_on: bool = False) -> Any:
        """Run the model in a recompute of the caller's checkpoint region. Nothing observes it: no backward follows."""
        plan = self.in_use
        sequence = self._second_runs.sequence(plan, self._forwards.held_bytes(self.model), self.model)
        return self._follow(sequence, plan, value, len(flying) + 1, goes_on=goes_on)

    def _follow(self, sequence: Sequence, plan: StepPlan, value: Any, number: int, *, goes_on: bool) -> Any:
        settings = self.settings
        smaller = Replanner(plan, self.model, number) if settings.on_oom == "replan" else None
        tier = None if sequence.moves is None or settings.offload is None else self.model.tier
        stages = settings.preserve_rng_state, plan.measurement, settings.keepers
        how = Following(sequence, *stages, smaller, tier, plan.changed, plan.budget.chain, goes_on)
        with undoing(), nullcontext() if smaller is None else smaller.explaining_other_errors():
            return plan.source.run(plan.cut, value, how)
