"""Watch steps: measure memory from a step's first forward to the end of its last backward, the caller's loss included.

Only a watch shows memory outside the model; if a step exceeds the limit, the planner solves again. A forward that
begins while others are in flight joins their step. A predicted plan is compared with its first watched step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rotor_profiling import Phase, StepWatch, optimizer_cost, storage_bytes, tensors_in, torch_compat, watch_step
from rotor_profiling.isolate import gradients_of
from rotor_profiling.storage import dense_parts
from rotor_py.distributed.processes import gather_objects
from rotor_py.errors import record_fields
from rotor_py.execute.backward_passes import current_task, retains_graph
from rotor_py.plan.solving import solve
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.saved_tensors import hook_gradients
from rotor_py.units import exact_bytes, format_bytes
from rotor_solver import InfeasibleError, simulate

_log = logging.getLogger("rotor_py")

_MOST_FORWARDS = 256
"""Maximum number of forwards of a watched step. A guess, above the microbatches of any pipeline: a step with more may
never end."""


_LATER = (10, 100, 1000)
"""Numbers of the steps of a plan that are watched again on the CPU, with every thousandth: losses may grow later."""


class _Alive:
    """A token that exists until its step is over: first the graphs of the outputs hold it, then the backward passes."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False)
class _Owned:
    """Holds the token of a forward's step as `token`, until the forward's last backward pass sets this to None."""

    token: _Alive | None
    task: int | None = None


class WatchedStep:
    """One watched step. Phases, in order: each forward and its loss, then each backward and the time after it."""

    def __init__(
        self,
        watch: StepWatch,
        model: TrainedModel,
        plan: StepPlan,
        limit_bytes: int,
        gradients: list[weakref.ref[torch.UntypedStorage]],
    ) -> None:
        self.watch = watch
        self.forwards = 0  # forwards that have returned
        self._model, self._plan, self._sequence, self._limit_bytes = model, plan, plan.sequence, limit_bytes
        self._gradients = gradients  # storages of gradients that existed when the step began
        self._token: weakref.ref[_Alive] | None = None
        self._most, self._one_plan = 1, True
        self._losses: list[str] = []  # names of the phases that begin when a forward returns, before any backward
        self._backwards, self._done = 0, 0  # numbers of forwards whose backward has begun, and whose backward is over
        self._in_first_pass = 0  # number of forwards through which the first backward pass goes
        self._outputs_held = False  # whether the caller holds outputs other than the loss when its backward is over
        self._retained: list[weakref.ref[_Owned]] = []
        self._differentiated: list[_Alive] = []

    def joined(self, plan: StepPlan, in_flight: int) -> bool:
        """Add a forward by `plan` to this step, the last of `in_flight`. False if the step is over or has too many."""
        if self._token is None or self._token() is None:
            return False
        if self.forwards == _MOST_FORWARDS:
            self._plan.watched = self._sequence  # do not watch the next step, which would have as many
            return False
        self._most = max(self._most, in_flight)
        self._one_plan = self._one_plan and plan is self._plan
        self.watch.mark(f"forward {self.forwards + 1}")
        return True

    def forward_returned(self, outputs: list[torch.Tensor]) -> None:
        token = None if self._token is None else self._token()
        if token is None:
            if self.forwards:
                return  # the step is over: the outputs of its other forwards were dropped while this one ran
            token = _Alive()
            self._token = weakref.ref(token)
            # The step is over when nothing holds the token any more: after the last backward pass, or when the outputs
            # were dropped.
            weakref.finalize(token, self._over).atexit = False
        self.forwards += 1
        loss = f"loss {self.forwards}"
        self.watch.mark(loss)
        if not self._backwards:
            self._losses.append(loss)
        owned, beside = _Owned(token), [each for each in outputs if each.dim() and not each.is_leaf]
        held = partial(_most_alive, _weakly(beside), storage_bytes(beside)) if len(beside) < len(outputs) else None
        hook_gradients(outputs, partial(self._gradient_arrived, owned, held))  # if the graph is freed, the token is

    def drop_retained(self) -> None:
        """Make graphs that backwards have retained release the token (`_Alive`), whose end is the end of the step."""
        for each in self._retained:
            if (owned := each()) is not None:
                owned.token = None
        self._differentiated.clear()

    def _gradient_arrived(self, owned: _Owned, held: Callable[[], bool] | None, gradient: torch.Tensor) -> None:
        task = current_task()
        if owned.token is None or owned.task == task:  # the gradient of another output has come first
            return
        owned.task, token = task, owned.token
        if retains_graph():  # another pass may follow, and need more memory
            self._retained.append(weakref.ref(owned))
            if torch.is_grad_enabled():  # a pass through the graphs of gradients need not reach an output
                self._differentiated.append(token)
        else:
            owned.token = None
        self._backwards += 1
        self.watch.mark(f"backward {self._backwards}")
        # The callback holds the token. The pass calls it inside the engine, where no watch can be stopped (Rule 3 of
        # the Note in `rotor_profiling/step.py`), and frees it, with the token, when the engine returns to its caller.
        torch_compat.queue_callback(partial(self._pass_done, token, held))

    def _pass_done(self, token: _Alive, held: Callable[[], bool] | None) -> None:
        self._done += 1
        # Check outputs when the pass is over: earlier, not only the caller but also the graph may hold them.
        self._outputs_held = self._outputs_held or (held is not None and held())
        self._in_first_pass = self._in_first_pass or self._backwards
        self.watch.mark(f"after {self._done}")

    def _over(self) -> None:
        phases = self.watch.stop()
        # If gradients from before the step were freed in it, the watch may not have seen that, and counts them still
        # (Rule 4 of the Note in `rotor_profiling/step.py`).
        if phases is None or self._done < self.forwards or any(each() is None for each in self._gradients):
            return
        if not phases.keys() >= {*self._losses}:  # a mark was lost, since something else used the profiler meanwhile
            return
        plan, peak_bytes = self._plan, max(phase.peak for phase in phases.values())
        plan.watched = self._sequence
        if plan.sequence is not self._sequence or self._most > max(1, plan.budget.forwards):
            return  # the plan has a new sequence by now, or gets one for more forwards in flight
        if plan.overruns > _MOST_OVERRUNS and peak_bytes <= (1 + MARGIN) * plan.told_bytes:
            return  # an earlier warning has named a peak about as large
        if self._one_plan:
            compare_with_prediction(peak_bytes, plan, self._model)
            if plan.prediction_holds is False:
                return  # the next forward measures, so the prediction need not be corrected
            loss, held = self._loss(phases), self._outputs_held
            account_for(loss, peak_bytes, self._limit_bytes, plan, self._model, outputs_held=held)
        elif peak_bytes > self._limit_bytes:
            # Change no plan: the watch does not show by which plan's forward the step exceeded the limit.
            plan.overruns, plan.told_bytes = plan.overruns + 1, max(plan.told_bytes, peak_bytes)
            more = (
                " Its forwards follow several plans, so these stay as they are: training goes on, beyond the limit. "
                f"Write mem_limit={max(1, 2 * self._limit_bytes - peak_bytes)}."
            )
            _warn_over_limit(self._model, peak_bytes, self._limit_bytes, more)

    def _loss(self, phases: dict[str, Phase]) -> Phase:
        """Return the memory of one loss. If one pass goes through several forwards, each counts for an equal share."""
        *before, last = (phases[name] for name in self._losses)
        rise = sum(phase.kept for phase in before) + last.rise
        kept = sum(phase.kept for phase in (*before, last))
        earlier = max((phase.rise for phase in before), default=0)
        return Phase(0, max(earlier, -(-rise // self._in_first_pass)), -(-kept // self._in_first_pass))


_MOST_OVERRUNS = 1
"""Number of steps over the limit after which the planner solves again. After later ones, it at most warns."""


class WatchedSteps:
    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        # the last watched step; only the graphs of its outputs keep the step alive
        self._step: weakref.ref[WatchedStep] | None = None
        self._watch: StepWatch | None = None
        self._running: WatchedStep | None = None
        self._device: tuple[StepPlan, torch.device] | None = None
        self._outputs: list[weakref.ref[torch.UntypedStorage]] = []  # storages of the last watched step's outputs

    def forward_begins(self, plan: StepPlan, value: Any, in_flight: int) -> None:
        """Add a forward on `value` to the watched step in progress, or begin to watch a new step (see `_begin`)."""
        self.end_retained()
        step = None if self._step is None or not in_flight else self._step()
        if step is None or not step.joined(plan, in_flight + 1):
            if self._watch is not None:
                self._watch.stop()  # of an earlier step, which has ended, or whose end nothing shows
            step = None if in_flight else self._begin(plan, value)
            self._step, self._watch = (None, None) if step is None else (weakref.ref(step), step.watch)
        self._running = step

    def end_retained(self) -> None:
        """End a step that only retained graphs keep from ending. Called before optimizer steps and forwards."""
        step = None if self._step is None else self._step()
        if step is not None:
            step.drop_retained()

    def forward_failed(self) -> None:
        self._running = None
        if self._watch is not None:
            self._watch.stop()

    def _begin(self, plan: StepPlan, value: Any) -> WatchedStep | None:
        asked = self._model.settings.watch
        if asked is False:
            return None
        plan.steps += 1
        # Cache the device: on CUDA, every step is watched, and finding the device takes longer than watching.
        if self._device is None or self._device[0] is not plan:
            self._device = plan, self._model.device_of(plan.input_spec)
        device, present_bytes = self._device[1], 0
        gradients: list[weakref.ref[torch.UntypedStorage]] = []
        again = plan.steps in _LATER or plan.steps % _LATER[-1] == 0
        if device.type == "cpu" and plan.watched is plan.sequence and not asked and not again:
            return None
        if plan.unlimited(self._model.settings):
            return None
        if device.type == "cpu":
            present = gradients_of(self._model.core.parameters())
            present_bytes = self._present_bytes(plan, value, present, device)
            # Omit sparse gradients: accumulation replaces them by new ones, so they are freed in any step.
            gradients = _weakly(each for each in present if each.layout == torch.strided)
        limit = self._model.limit_bytes(device)
        watch = watch_step(device, present_bytes, limit)
        return None if watch is None else WatchedStep(watch, self._model, plan, limit, gradients)

    def _present_bytes(self, plan: StepPlan, value: Any, gradients: list[torch.Tensor], device: torch.device) -> int:
        """Return the bytes of tensors that exist when a step on the CPU begins. PyTorch has no counter for these."""
        core = self._model.core
        present = [*core.parameters(), *core.buffers(), *gradients, *tensors_in(value)]
        # Count the last output, which the caller may hold until it gets the new one, and optimizer state, even before
        # the first optimizer step makes it: so all steps count the same.
        outputs = sum(storage.nbytes() for each in self._outputs if (storage := each()) is not None)
        on_device = storage_bytes(tensor for tensor in present if tensor.device == device)
        if self._model.settings.step_in_backward is not None:
            return on_device + outputs + optimizer_cost(self._model.settings.step_in_backward).present_bytes
        return on_device + outputs + plan.budget.fixed.optimizer

    def forward_returned(self, output: Any) -> None:
        step, self._running = self._running, None
        if step is None:
            return
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._outputs = [*(self._outputs if step.forwards else ()), *_weakly(tensors)]
        step.forward_returned(tensors)


def _weakly(tensors: Iterable[torch.Tensor]) -> list[weakref.ref[torch.UntypedStorage]]:
    return [weakref.ref(part.untyped_storage()) for tensor in tensors for part in dense_parts(tensor)]


def _most_alive(storages: list[weakref.ref[torch.UntypedStorage]], nbytes: int) -> bool:
    alive = {each for each in (storage() for storage in storages) if each is not None}
    return 2 * sum(each.nbytes() for each in alive) > nbytes


def account_for(
    loss: Phase, peak_bytes: int, limit: int, plan: StepPlan, model: TrainedModel, *, outputs_held: bool
) -> None:
    """Correct the budget of `plan` after a step that took `peak_bytes`, of which its loss took `loss`. If the corrected
    peak exceeds `limit`, warn, and solve again if the plan may change. `outputs_held`: whether the caller has held
    outputs other than the loss through the backward.
    """
    plan.store_changed(model.settings)  # before solving: the next plan must store these stages
    measurement, budget = plan.measurement, plan.budget
    before = budget.peak_bytes(plan.followed)
    outputs_held = outputs_held and not measurement.outputs_held
    if outputs_held:
        measurement = replace(measurement, outputs_held=True, output_held=True)
        budget = budget.with_outputs_held(plan.measurement, measurement, fresh_gradients=plan.fresh_gradients)
    planned, gradient, dropped = measurement.loss, budget.chain.activation[-1], measurement.dropped_bytes
    # As in `measure_loss`, subtract the output's gradient, which the chain counts, and add outputs dropped in the loss.
    rise, kept = (loss.rise and loss.rise + dropped) - gradient, loss.kept + dropped - gradient
    temp, kept = max(planned.temp_bytes, rise), max(planned.kept_bytes, kept)
    found = replace(planned, temp_bytes=temp, kept_bytes=kept)
    if found == planned and not outputs_held and peak_bytes <= limit:
        return
    limit = max(limit, before)  # if the plan itself exceeds the limit, a warning has said so: compare with the plan
    measurement = replace(measurement, loss=found)
    budget = budget.with_found(measurement, kept - planned.kept_bytes, fresh_gradients=plan.fresh_gradients)
    # Count bytes over the limit that are not the loss's as held throughout the step.
    other = max(0, peak_bytes - budget.peak_bytes(plan.followed)) if peak_bytes > limit else 0
    budget = budget.with_found(measurement, other, fresh_gradients=plan.fresh_gradients)
    peak = budget.peak_bytes(plan.followed)
    if plan.file is None:
        plan.budget, plan.measurement = budget, measurement
    of_loss = of_others = of_outputs = ""
    outputs_bytes = measurement.held_bytes + measurement.other_outputs if outputs_held else 0
    if outputs_held:
        of_outputs = (
            f" It holds {format_bytes(outputs_bytes)} of outputs other than the loss through its backward: keep only "
            "the loss (loss = model(...).loss, or del output) to have them freed before it."
        )
        if peak <= limit and not model.holds_outputs:
            name, extra = type(model.core).__name__, record_fields("outputs_held", outputs_bytes=outputs_bytes)
            _log.info("a training step of %s takes %s.%s", name, exact_bytes(peak), of_outputs, extra=extra)
        model.holds_outputs = True
    if peak <= limit:
        return
    if temp + kept > planned.temp_bytes + planned.kept_bytes:
        how = "pass it as loss=, or" if model.settings.loss is None else "run all of it in loss=, or give instead"
        of_loss = (
            f" Its loss needs {format_bytes(temp)} beyond the gradient of the output, and the plan has "
            f"{format_bytes(planned.temp_bytes)}: {how} loss_tmp_memory_usage={temp}, so that it counts from the "
            "start."
        )
    if other:
        rest = f", or write mem_limit={limit - other}" if budget.least_bytes() <= limit else ""
        of_others = (
            f" It holds {format_bytes(other)} that the plan does not count, such as other inputs and outputs, or "
            f"graphs of gradients: free them{rest}."
        )
    plan.overruns, plan.told_bytes = plan.overruns + 1, max(plan.told_bytes, peak_bytes)
    remedy = plan.why_it_stays(model)
    if remedy is None and plan.overruns > 1:
        remedy = "An earlier step was planned again already, so the plan stays: training goes on, beyond the limit."
    elif remedy is None:
        try:
            takes = exact_bytes(plan.budget.peak_bytes(solve(plan, model)))
            remedy = f"It was planned again with these bytes, and takes {takes} from now on."
        except InfeasibleError as error:
            remedy = f"Training goes on, beyond the limit: {error}"
    numbers = {"loss_bytes": temp if of_loss else 0, "other_bytes": other, "outputs_bytes": outputs_bytes}
    goes_on = budget.peak_bytes(plan.followed) > limit
    _warn_over_limit(model, peak, limit, f"{of_outputs}{of_loss}{of_others} {remedy}", goes_on=goes_on, **numbers)


def _warn_over_limit(model: TrainedModel, peak: int, limit: int, more: str, **numbers: int) -> None:
    name = type(model.core).__name__
    _log.warning(
        "a training step of %s takes %s, and the limit is %s.%s",
        name,
        exact_bytes(peak),
        exact_bytes(limit),
        more,
        extra=record_fields("over_limit", name=name, peak_bytes=peak, mem_limit=limit, **numbers),
    )


MARGIN = 0.05
"""Share of a predicted peak, or of one that a warning has named, by which a step's peak may differ without a warning. A
guess: transformers differ by less than a hundredth, convolutions by more if a library allocates much memory. A smaller
margin costs needless measurements, a larger one hides wrong predictions."""
_MOST_ASKED = 16
"""Number of forwards in which processes tell each other whether the prediction holds. A guess: the first watched step
shows it. With too few, a wrong prediction stays."""


def compare_with_prediction(peak_bytes: int, plan: StepPlan, model: TrainedModel) -> None:
    """Compare a step with the prediction of its plan; do nothing if the plan has none, or was compared before."""
    if plan.file is None or plan.file.predicted_for is None or plan.prediction_holds is not None:
        return
    budget, sequence = plan.budget, plan.followed
    expected = max(
        budget.fixed.total + budget.before_bytes,
        budget.beside_chain(sequence) + simulate(budget.chain, sequence).peak,
    )
    # The first step begins without the gradients that the prediction counts and, on CUDA, without the optimizer state,
    # which the optimizer's first step makes. On the CPU, `_present_bytes` counts that state from the beginning.
    on_cpu = model.device_of(plan.input_spec).type == "cpu"
    missing = budget.fixed.gradients + (0 if on_cpu else budget.fixed.optimizer)
    plan.prediction_holds = (1 - MARGIN) * expected - missing <= peak_bytes <= (1 + MARGIN) * expected
    if plan.prediction_holds:
        return
    _log.warning(
        "the plan was predicted for %s, and a training step of %s takes %s instead of the predicted %s. The model is "
        "measured here, and planned again, at the next step%s.",
        plan.file.predicted_for,
        type(model.core).__name__,
        exact_bytes(peak_bytes),
        exact_bytes(expected),
        "" if model.alone else " in which the batch of every process is as large",
        extra=record_fields("other_than_predicted", peak_bytes=peak_bytes, predicted_bytes=expected),
    )


def disproved(plan: StepPlan, model: TrainedModel, *, as_large: bool) -> bool:
    """Whether a step has disproved the prediction of `plan`, so that the model has to be measured now.

    Either all processes measure or none. They exchange their results before the second and later forwards. All measure
    once a process has a wrong prediction and all have a batch `as_large` as the plan's, which the new plan must cover.
    """
    if plan.file is None or plan.file.predicted_for is None:
        return False
    if (group := model.group) is None:
        return plan.prediction_holds is False
    plan.asked += 1
    if not 1 < plan.asked <= _MOST_ASKED:
        return False
    found = gather_objects((plan.prediction_holds, as_large), group, model.device_of(plan.input_spec))
    if all(holds for holds, _ in found):
        plan.asked = _MOST_ASKED
    return any(holds is False for holds, _ in found) and all(large for _, large in found)
