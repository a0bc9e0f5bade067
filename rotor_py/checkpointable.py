"""`Checkpointable(model)`: a model that trains inside a memory limit, with the numbers of plain training."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from rotor_profiling import tensors_in
from rotor_py.by_hand.strategy import ByHand
from rotor_py.capture.graph_stage import in_context
from rotor_py.capture.session import CaptureSession
from rotor_py.distributed.processes import size_of
from rotor_py.distributed.whole_parameters import as_entered, is_sharded
from rotor_py.errors import PlanMismatchError, UnsupportedModelError
from rotor_py.execute import regions
from rotor_py.execute.program import Program, program
from rotor_py.execute.tape import replay
from rotor_py.measure.budget import Budget
from rotor_py.measure.cut import Cut, cut, is_chain
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.planning_lock import planning
from rotor_py.measure.stages import measure
from rotor_py.plan.fingerprint import input_fingerprint, model_fingerprint
from rotor_py.plan.input_spec import covers, gradients_of, reaches, same_kind, spec_of, words
from rotor_py.plan.kinds import Kinds
from rotor_py.plan.model_state import ModelState
from rotor_py.plan.optimizers import wait_for_optimizers
from rotor_py.plan.plan import Plan
from rotor_py.plan.planned import Planned
from rotor_py.report.progress import progress_bar
from rotor_py.stage.runner import StageRunner
from rotor_py.transparent import ModelsSignature, core_of, in_training, instead_of_forward
from rotor_solver import Chain, Sequence
from rotor_solver.progress import Progress

_log = logging.getLogger("rotor_py")
_MOST_PLANS = 16


class Checkpointable(Planned):
    """A model whose training step stays inside `mem_limit`, at the least extra time.

    It shares the parameters, buffers, children and hooks of `model`: state dicts and names are those of the model, and
    so are its attributes. In training mode a forward follows a plan, which the first call makes if there is none yet;
    in eval mode, or without gradients, it is the model.

    Args:
        model: any model. A nesting of `nn.Sequential` is a chain of its layers; of any other, TorchDynamo captures the
            graph, which is cut into stages.
        custom_input: an input to measure with, now: a tensor, a tuple of positional or a dict of keyword arguments.
        mem_limit: the peak of a whole training step on the device: bytes, or a text such as "4GB", "512MiB", "80%".
            None is 90 % of what the device can give this process.
        mem_slots: how finely the solver divides memory.
        verbosity: 0 says nothing; from 1 on, plans and the progress of measuring are logged to `rotor_py`.
        preserve_rng_state: whether what is computed again draws the same random numbers.
        loss_tmp_memory_usage: bytes that the loss needs beyond its gradient, where `loss` is not given.
        loss: the loss as a function of the output, to be measured.
        optimizer: the optimizer, whose state counts. One that is not given is noticed when it takes its first step, and
            counts from then on: a trainer may make it.
        fresh_grads: gradients are freed between steps (`zero_grad(set_to_none=True)`, its default), so that their
            memory is there for activations. If they are kept, to accumulate, leave it False.
        progress: called with (stages done, all stages, name of the next) while measuring. Without it, a bar is shown on
            a terminal if measuring takes longer than a moment.
        plan: a file written by `rotor-plan --save` or `save_plan`, to be used instead of measuring. What was
            measured for it is in the file, so that `report()` and `memory()` say what they said there.
        granularity: the most stages into which a captured graph is cut.
        process_group: the processes that train this model together and have to follow one plan. With
            DistributedDataParallel, around this or inside it, it is known.
        level: checkpoint by hand instead: every module of this level (`assign_levels`) is run again from its input.
        every_n_layers: checkpoint by hand instead: keep the inputs of the stages 0, n, 2n, … (0: store everything).
        max_checkpoints: with `every_n_layers`, the most inputs that are kept.

    `level` and `every_n_layers` need what they need: `mem_limit` is looked at if it is given, and nothing is solved.
    """

    # fmt: off
    _own = frozenset({
        "budget", "captured", "chain", "forward", "functions", "inspection_values", "loss_tmp_memory_usage",
        "mem_limit", "mem_slots", "model", "names", "preserve_rng_state", "progress", "sequence", "training",
        "verbosity",
    })
    # fmt: on

    def __init__(
        self,
        model: nn.Module,
        custom_input: Any = None,
        mem_limit: int | str | None = None,
        mem_slots: int = 500,
        verbosity: int = 0,
        preserve_rng_state: bool = True,
        loss_tmp_memory_usage: int = 0,
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        fresh_grads: bool = False,
        plan: str | Path | Plan | None = None,
        progress: Progress | None = None,
        granularity: int = 100,
        process_group: ProcessGroup | None = None,
        level: int | None = None,
        every_n_layers: int | None = None,
        max_checkpoints: int | None = None,
    ) -> None:
        if isinstance(model, Checkpointable):
            raise UnsupportedModelError("the model is a Checkpointable already; wrap it once")
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(f"the model is {_what(model)}; it has to be a torch.nn.Module")
        if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")):
            raise TypeError(
                f"optimizer is {_what(optimizer)}; pass the optimizer that will step, made of the model's parameters"
            )
        super().__init__(model)
        self.mem_limit = mem_limit
        self.mem_slots = mem_slots
        self.verbosity = verbosity
        self.preserve_rng_state = preserve_rng_state
        self.loss_tmp_memory_usage = loss_tmp_memory_usage
        self.names: list[str] = []
        self.functions: list[nn.Module] = []
        self.inspection_values: Measurement | None = None
        self.chain: Chain | None = None
        self.sequence: Sequence | None = None
        self.budget: Budget | None = None
        self.progress = progress
        self._loss = loss
        self._optimizer = optimizer
        self._fresh_grads = fresh_grads
        self._cut: Cut | None = None
        self._state: ModelState | None = None
        self._program: tuple[Sequence, Program] | None = None
        self._value: Any = None
        self._plan: Plan | None = None
        self._group = process_group
        self._agreed: Sequence | None = None
        self._last_resort: Sequence | None = None
        self._solved_for: tuple[int | str | None, int] | None = None
        self._core = core_of(model)
        self._granularity = granularity
        self._capture = None if is_chain(self._core) else self._new_capture()
        self._kinds = Kinds()
        self._plans = 0
        if optimizer is None:
            wait_for_optimizers(self)
        self._by_hand = ByHand.asked_for(level, every_n_layers, max_checkpoints)
        if mem_limit is not None:
            self._limit_bytes(mem_limit)
        if plan is not None:
            if self._by_hand is not None:
                raise ValueError(f"a plan is given, and {self._by_hand}; give one of them")
            self._adopt(plan if isinstance(plan, Plan) else Plan.load(plan))
        elif custom_input is not None:
            self.measure(custom_input)
            if mem_limit is not None or self._by_hand is not None:
                self.compute_sequence()

    # Planning

    @property
    def captured(self) -> bool:
        """Whether TorchDynamo captures the model's graph; a nesting of `nn.Sequential` is a chain as it stands."""
        return self._capture is not None

    def measure(self, custom_input: Any) -> None:
        """Measure every stage on `custom_input`: a tensor, a tuple of positional or a dict of keyword arguments.

        Parameters, gradients, buffers, random state and mode are afterwards what they were. Stages are measured in
        training mode.
        """
        arguments, keywords = arguments_of(custom_input)
        if self._capture is not None:
            self._prepare_captured(arguments, keywords)
        else:
            self._prepare(self._chain_input(arguments, keywords))

    # Training

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        make, arguments, state = super().__reduce_ex__(protocol)
        state = {**state, "_kinds": None, "_plans": 0}
        if self._capture is not None:  # a copy captures graphs of its own, at its first step
            unknown = ("_agreed", "_cut", "_program", "_state", "_value", "budget", "chain", "inspection_values")
            sequence = None if self._plan is None else self._plan.sequence
            state = {**state, **dict.fromkeys(unknown), "sequence": sequence, "names": [], "functions": []}
        return make, arguments, state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it so
        self._kinds = Kinds()
        if self._optimizer is None:
            wait_for_optimizers(self)

    # torch.compile(Checkpointable(model)) follows the plan, uncompiled.
    @ModelsSignature
    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch leaves it so
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; in training mode, so that the backward follows the plan."""
        if not self.training or not torch.is_grad_enabled():
            return self.model.forward(*args, **kwargs)
        if isinstance(self.model, DistributedDataParallel):
            with instead_of_forward(self._core, self._planned):
                return self.model.forward(*args, **kwargs)
        return self._planned(*args, **kwargs)

    def _planned(self, *args: Any, **kwargs: Any) -> Any:
        state = ModelState.of(self._core)
        if self._capture is not None:
            return self._forward_captured(self._capture, state, args, kwargs)
        value = self._chain_input(args, kwargs)
        if not state.trains and not any(tensor.requires_grad for tensor in tensors_in(value)):
            return self._core.forward(*args, **kwargs)
        instructions = self._instructions(value, state)
        assert self._cut is not None
        for _, layer in self._cut.prefix:
            value = layer(value)
        runners = [StageRunner(function, name, self.preserve_rng_state) for name, function in self._cut.stages]
        if is_sharded(self._core):
            assert self.sequence is not None
            return regions.run(runners, regions.regions(self.sequence), value)
        return replay(runners, instructions, value)

    def _instructions(self, value: Any, state: ModelState) -> Program:
        """What to do with the input `value`: as planned, if that was for the same; else measure and solve first."""
        self._make_ready(value, state)
        if self._program is None or self._program[0] is not self.sequence:
            assert self.sequence is not None
            self._program = self.sequence, program(len(self.names), self.sequence)
        return self._program[1]

    def _make_ready(self, value: Any, state: ModelState) -> None:
        """Measure and solve, if the model is not what it was when that was last done."""
        if self._plan is not None:
            if state != self._state:
                self._plan.refuse_other(model=model_fingerprint(self._core))
                self._cut, self._state = self._plan.cut(self._core), state
                self._name_stages()
            if self._value is None or not covers(self._value, value):
                self._plan.refuse_other(value=input_fingerprint(value, self.device))
                self._value = spec_of(value)
            self._agree()
            return
        known = self._turn_to(state, value)
        alone = size_of(self._processes()) == 1
        other = state != self._state or (alone and gradients_of(self._value) != gradients_of(spec_of(value)))
        if not known and (self._cut is None or other):
            self._prepare(value)
        elif not covers(self._value, value):
            raise UnsupportedModelError(
                f"the input is {words(spec_of(value))}, and the plan was made for {words(self._value)}; call measure() "
                "with the largest input there will be"
            )
        self._agree()

    def _turn_to(self, state: ModelState, value: Any) -> bool:
        """Whether something is planned for steps of this kind, which is then what is planned."""
        if self._cut is not None and state == self._state and same_kind(self._value, spec_of(value)):
            return True
        return self._kinds.take_up(self, state, spec_of(value))

    def _begin_planning(self, value: Any) -> bool:
        """Make room for a plan for steps on `value`; whether there was one for another kind of step."""
        with in_training(self):
            state, spec = ModelState.of(self._core), spec_of(value)
        another = self._plan is None and not (state == self._state and same_kind(self._value, spec))
        if another:
            self._kinds.put_aside(self, state)
        self._kinds.drop(state, spec)
        self._plan = self._cut = self._state = self.sequence = self.budget = None
        self._value = spec
        return another

    def _prepare(self, value: Any) -> None:
        """Cut and measure on the chain's input `value`; what was planned for the same kind of step is forgotten."""
        self._begin_planning(value)
        shown = nullcontext(self.progress) if self.progress else progress_bar()
        with planning, in_training(self), torch.enable_grad(), shown as progress:
            found = cut(self._core, value, self.device)
            measurement = measure(found, value, self.device, loss=self._loss, progress=progress, **self._measuring())
            self._state = ModelState.of(self._core)
        self._account(found, measurement, value)

    # Captured graphs

    def _prepare_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture the model's graphs, cut and measure them."""
        args, kwargs = as_entered(self._core, (args, kwargs))
        if self._begin_planning((args, kwargs)) or self._capture is None:
            self._capture = self._new_capture()
        capture = self._capture
        shown = nullcontext(self.progress) if self.progress else progress_bar()
        with planning, in_training(self), torch.enable_grad(), shown as progress:
            found, measurement, shared = capture.measure(
                args, kwargs, self.device, loss=self._loss, progress=progress, **self._measuring()
            )
            self._state = ModelState.of(self._core)
        self._account(found, measurement, (args, kwargs, shared))

    def _forward_captured(
        self, capture: CaptureSession, state: ModelState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        trains = any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        if not state.trains and not trains:
            return self._core.forward(*args, **kwargs)
        value = (args, kwargs)
        if self._plan is not None:
            if state != self._state:
                self._plan.refuse_other(model=model_fingerprint(self._core))
                self._state = state
            if self._value is None or not reaches(self._value, value):
                self._plan.refuse_other(value=input_fingerprint(value, self.device))
                self._value = spec_of(value)
            self._agree()
            return capture.run(args, kwargs)
        if not self._turn_to(state, value) or not reaches(self._value, value):
            self._plan_again(args, kwargs)
        self._agree()
        assert self._capture is not None
        try:
            return self._capture.run(args, kwargs)
        except PlanMismatchError:  # the model takes another way, for another shape for example
            self._plan_again(args, kwargs)
            self._agree()
            return self._capture.run(args, kwargs)

    def _plan_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan for a first or larger input, or another kind of step; UnsupportedModelError if there is no end to it."""
        self._plans += self._cut is None or ModelState.of(self._core) == self._state
        if self._plans > _MOST_PLANS:
            raise UnsupportedModelError(
                f"the model has been planned {_MOST_PLANS} times, and its input has changed again; call measure() once "
                "with the largest input there will be"
            )
        if self._cut is not None and not reaches(self._value, (args, kwargs)) and size_of(self._processes()) > 1:
            raise UnsupportedModelError(
                f"the input is {words(spec_of((args, kwargs)))}, for which there is no plan, and processes that train "
                "together cannot each make one; call measure() in all of them with the largest input there will be"
            )
        if self._cut is not None:
            same = same_kind(self._value, spec_of((args, kwargs))) and ModelState.of(self._core) == self._state
            why = "planning again" if same else "planning for another kind of step"
            _log.warning("%s: the input is %s", why, words(spec_of((args, kwargs))))
        self._prepare_captured(args, kwargs)

    def _new_capture(self) -> CaptureSession:
        return CaptureSession(self._core, self._run_captured, self._granularity)

    def _run_captured(self, runnable: Cut, value: Any) -> Any:
        """Run the stages of the main graph by the plan."""
        if self._program is None or self._program[0] is not self.sequence:
            assert self.sequence is not None
            self._program = self.sequence, program(len(runnable.stages), self.sequence)
        for _, layer in runnable.prefix:
            value = layer(value)
        runners, value = in_context(runnable.stages, value, self.preserve_rng_state)
        if is_sharded(self._core):
            assert self.sequence is not None
            return regions.run(runners, regions.regions(self.sequence), value)
        return replay(runners, self._program[1], value)

    def _adopt(self, plan: Plan) -> None:
        plan.refuse_other(model=model_fingerprint(self._core))
        self._adopt_costs(plan)
        if self._capture is not None:
            self._capture.cut_like = plan.cut_layers
        else:
            self._cut = plan.cut(self._core)
            self._name_stages()

    def _chain_input(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The one value that goes into the first layer."""
        if len(arguments) == 1 and not keywords:
            return arguments[0]
        bound = inspect.signature(self._core.forward).bind(*arguments, **keywords)
        (value,) = bound.arguments.values()
        return value


def _what(value: Any) -> str:
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__


def arguments_of(custom_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that an input stands for: a tensor, a tuple or a dict."""
    if isinstance(custom_input, dict):
        return (), custom_input
    return (custom_input if isinstance(custom_input, tuple) else (custom_input,)), {}
