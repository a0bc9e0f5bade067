"""Train a model inside a memory limit, with the results of plain training: `Checkpointable(model)`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from rotor_profiling.torch_compat import disable_dynamo
from rotor_py.by_hand.strategy import ByHand
from rotor_py.compile.stage_code import Compile
from rotor_py.errors import InvalidValueError, UnsupportedModelError, record_fields, what_it_is
from rotor_py.measure.budget import Budget
from rotor_py.measure.planning_lock import planning
from rotor_py.plan.planned_model import PlannedModel
from rotor_py.plan.planner import Planner
from rotor_py.plan.saved_plan import Plan
from rotor_py.plan.settings import Settings, refuse_excluded
from rotor_py.plan.solving import solve
from rotor_py.plan.step_spec import arguments_of
from rotor_py.stage.protocol import calling_instead
from rotor_py.transparent import Transparent, core_of, in_training
from rotor_solver import Algorithm, Chain, InfeasibleError, Sequence
from rotor_solver.watching import Progress

_log = logging.getLogger("rotor_py")


class ModelsSignature:
    """Descriptor that gives `forward` the signature of the model's own: trainers read its arguments' names there."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._signed: WeakKeyDictionary[type, Callable[..., Any]] = WeakKeyDictionary()

    def __get__(self, instance: Transparent | None, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._method
        return MethodType(self._like(type(instance.__dict__["model"])), instance)

    def _like(self, kind: type) -> Callable[..., Any]:
        if kind not in self._signed:  # one function per class, so that `module.forward == module.forward`
            method = self._method

            @wraps(method)
            def signed(*args: Any, **kwargs: Any) -> Any:
                return method(*args, **kwargs)

            with suppress(AttributeError, TypeError, ValueError):  # methods written in C may have no signature
                signed.__signature__ = inspect.signature(getattr(kind, method.__name__))  # type: ignore[attr-defined] # read by inspect
            self._signed[kind] = signed
        return self._signed[kind]


class Checkpointable(PlannedModel):
    """A model whose training step stays inside `mem_limit`, at the least extra time.

    It shares the parameters, buffers, children and hooks of `model`; state dicts, names and attributes are the same.
    Forward and backward follow a plan, which the first training forward makes if there is none. The model runs without
    a plan under `torch.no_grad()`, and in eval mode, unless `mem_limit` is given and a single process trains.

    Args:
        model: any model. The layers of an `nn.Sequential`, nested ones included, are its stages; of any other model,
            TorchDynamo captures the graph, which is then cut into stages.
        custom_input: an input on which the constructor measures the model: a tensor, a tuple of positional or a dict of
            keyword arguments, or a `DataLoader`, whose first batch is taken.
        mem_limit: maximum memory of a whole training step on the device: bytes, or text such as "4GB", "512MiB", "80%".
            None is 90 % of the bytes that the device can give this process.
        mem_slots: number of slots into which the solver divides memory. More slots: faster plans, slower solving.
        verbosity: from 1 on, plans and the progress of measuring are logged to `rotor_py` at level WARNING, which
            Python shows without any setup of logging. With 0, measuring is logged at level INFO.
        preserve_rng_state: whether recomputed stages draw the same random numbers as in the forward.
        loss_tmp_memory_usage: bytes that the loss needs beyond the gradient of the output, if `loss` is not given.
        loss: function that maps the model's output to the loss, so that its time and memory are measured.
        optimizer: optimizer whose state counts toward the limit. Detected at its first step if omitted.
        fresh_grads: whether gradients are freed between steps, as by `zero_grad(set_to_none=True)`, the default of
            PyTorch, so that activations can use their memory. Leave it False to accumulate gradients.
        forwards_in_flight: number of forwards of this model that run before the first backward: 2 if the losses of two
            forwards are summed, as for siamese networks, or a discriminator on real and fake data. The plan leaves room
            for all of them. If a step has more, plans of later steps leave room for these, too.
        backward_order: order of the backwards of several forwards in flight: "any", or "reverse" if the last forward
            goes backward first, as in `(loss1 + loss2).backward()`, for which there are faster plans. None: "any" until
            three steps were in reverse, then "reverse"; after a backward in another order, "any" again, with a warning
            if that step exceeds the limit.
        progress: function to call while measuring, with the numbers of measured and of all stages, and the next name.
            None: a progress bar on a terminal, if measuring takes a while. True: the bar, and log lines. False: no bar.
        cache: whether measurements are stored on disk, in `~/.cache/rotor_plan`, for the next run.
        plan: a file written by `rotor-plan --save` or `save_plan`: steps follow its plan, and nothing is measured.
            `report()` and `memory()` read the measurements in the file. For a plan with compiled stages, pass the same
            `compile`; the first step compiles them again.
        granularity: maximum number of stages into which a captured graph is cut.
        process_group: the processes that train this model together by one plan. Not needed with
            DistributedDataParallel, around this module or inside it.
        watch: which steps have their memory measured, from the forward to the end of the backward. If such a step
            exceeds the limit, for example in an undeclared loss, the planner logs it and plans anew. None: on CUDA
            every step, by counters; on the CPU, by PyTorch's profiler, each plan's first step, its 10th, 100th and
            every 1,000th, and those with other numbers of autograd nodes or backward passes. True: every step. False:
            no step; the planner then detects neither the order of backwards nor training without a plan.
        level: checkpoint by hand, without a solver: recompute every module of this level (see `assign_levels`).
        every_n_layers: checkpoint by hand, without a solver: store the inputs of stages 0, n, 2n, … (0: store all).
        max_checkpoints: with `every_n_layers`, the maximum number of stored inputs.
        on_oom: "raise" passes on an out-of-memory error of the device in a stage; "replan" repeats the failed work by
            a plan that needs less memory, up to three times for a forward and its backward; results stay the same.
        compile: have Inductor compile the stages: True, a mode of `torch.compile`, or a dict of Inductor's options.
            Identical stages are compiled once, and measured compiled and uncompiled; the plan uses the better variant
            for the limit. Results are those of compiled training that recomputes nothing.
        step_in_backward: optimizer that steps each parameter in the backward as soon as its gradient is complete, and
            frees the gradient. The training loop and its results are those of plain training; `optimizer.step()` only
            ends the step. For SGD, Adam, AdamW and others of torch.optim that step each parameter independently.
            Gradients cannot be accumulated, clipped by norm or unscaled (GradScaler): reading a freed one is an error.
        offload: tier to which activations may be offloaded until their backward: "host" (pinned memory, for a CUDA
            device) or "file:/path" (an unnamed file in that folder, for a model on the CPU). The solver decides which
            activations to offload, and when, from the measured bandwidth.
        keep: "bf16", "fp8" or "int8": lets plans round tensors that stages save for the backward to this type, if that
            is better for the limit. The forward stays exact, gradients differ. None: no tensor is rounded.

    With `level` or `every_n_layers`, no solver runs, and steps have no limit unless `mem_limit` is given. If they need
    more than this, planning raises InfeasibleError.

    Raises UnsupportedModelError for a model that cannot be trained from a plan; TypeError for an invalid optimizer;
    ValueError for an invalid limit, `backward_order` or `keep`, for `forwards_in_flight` < 1, for a `compile` that
    `torch.compile` does not know or that records CUDA graphs, or for arguments that exclude each other; with `plan`,
    PlanMismatchError if the file's model, `compile` or `keep` differ; with `custom_input` and a limit, InfeasibleError
    if no plan fits.
    """

    def __init__(
        self,
        model: nn.Module,
        custom_input: Any = None,
        mem_limit: float | str | None = None,
        mem_slots: int = 500,
        verbosity: int = 0,
        preserve_rng_state: bool = True,
        loss_tmp_memory_usage: int = 0,
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        fresh_grads: bool = False,
        forwards_in_flight: int = 1,
        backward_order: Literal["any", "reverse"] | None = None,
        plan: str | Path | Plan | None = None,
        progress: Progress | bool | None = None,
        cache: bool = True,
        granularity: int = 100,
        process_group: ProcessGroup | None = None,
        watch: bool | None = None,
        level: int | None = None,
        every_n_layers: int | None = None,
        max_checkpoints: int | None = None,
        on_oom: Literal["raise", "replan"] = "raise",
        compile: Compile = False,
        step_in_backward: torch.optim.Optimizer | None = None,
        offload: str | None = None,
        keep: Literal["bf16", "fp8", "int8"] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            message = f"the model must be a torch.nn.Module, got {what_it_is(model)}"
            raise UnsupportedModelError(message, kind="not_a_module", name="model")
        _refuse_parts(model)
        settings = Settings(
            mem_limit=mem_limit,
            mem_slots=mem_slots,
            verbosity=verbosity,
            preserve_rng_state=preserve_rng_state,
            loss_tmp_memory_usage=loss_tmp_memory_usage,
            loss=loss,
            optimizer=optimizer,
            fresh_grads=fresh_grads,
            progress=progress,
            cache=cache,
            granularity=granularity,
            process_group=process_group,
            forwards_in_flight=forwards_in_flight,
            backward_order=backward_order,
            by_hand=ByHand.asked_for(level, every_n_layers, max_checkpoints),
            watch=watch,
            on_oom=on_oom,
            compile=compile,
            step_in_backward=step_in_backward,
            offload=offload,
            keep=keep,
        )
        super().__init__(model)
        self.__dict__["_planner"] = Planner(model, core_of(model), settings)
        if mem_limit is not None:
            self._planner.set_limit(mem_limit)
        if plan is not None:
            refuse_excluded(settings, plan="plan=")
            self._planner.adopt(plan if isinstance(plan, Plan) else Plan.load(plan))
        elif custom_input is not None:
            if mem_limit is not None:
                self.refuse_what_cannot_fit(custom_input)
            self.measure(custom_input)
            if mem_limit is not None or settings.by_hand is not None:
                self.compute_sequence()

    @ModelsSignature
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, as its own forward does; the backward of the result follows the plan."""
        # Under `torch.compile(Checkpointable(model))`, Dynamo traces this line only, with `is_compiling()` True.
        return self._forward_untraced(torch.compiler.is_compiling(), *args, **kwargs)

    # `torch.compiler.disable` would import TorchDynamo right here, the private `disable_dynamo` only at the first call.
    @disable_dynamo
    def _forward_untraced(self, traced: bool, /, *args: Any, **kwargs: Any) -> Any:
        planner = self._planner
        # Plan a forward in eval mode, too, which may train inputs or adapters, if there is a limit and one process.
        if not torch.is_grad_enabled() or not (self.training or (self.mem_limit is not None and planner.model.alone)):
            return self.model.forward(*args, **kwargs)
        if traced and planner.settings.inductor is None:
            text = "write Checkpointable(model, compile=True): torch.compile around a Checkpointable compiles nothing"
            planner.warn_once(text, record_fields("compile_ignored", name="torch.compile"))
        if isinstance(self.model, DistributedDataParallel):
            # DDP's own forward prepares the reducer, then calls the inner module, which follows the plan.
            with calling_instead(planner.model.core, planner.run):
                return self.model.forward(*args, **kwargs)
        try:
            return planner.run(*args, **kwargs)
        except InfeasibleError as error:
            if self.training:
                raise
            text = f"use torch.no_grad() if you need no gradients: a forward in eval mode runs without a plan ({error})"
            extra = record_fields("evaluation_over_limit", min_bytes=error.min_bytes, mem_limit=error.mem_limit)
            planner.warn_once(text, extra)
        # Run without a plan, after the `except` block: inside it, the error's traceback would hold tensors.
        return self.model.forward(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the stages from the next step on, with the arguments of `torch.compile`.

        Raises ValueError for a backend other than Inductor, `mode` together with `options`, and recorded CUDA graphs.
        """
        inspect.signature(torch.compile).bind(None, *args, **kwargs)  # TypeError for an unknown argument
        if kwargs.get("backend", "inductor") != "inductor" or kwargs.get("disable"):
            message = "only Inductor can compile stages; leave backend= and disable= out"
            raise InvalidValueError(message, kind="excluded_together", name="backend")
        mode, options = kwargs.get("mode"), kwargs.get("options")
        if mode is not None and options is not None:
            raise InvalidValueError(
                "mode and options exclude each other; leave one of them out", kind="excluded_together", name="options"
            )
        if kwargs.get("dynamic"):
            said = "dynamic=True has no effect on a planned step: stages are compiled for one shape at a time"
            _log.warning(said, extra=record_fields("compile_ignored", name="dynamic"))
        self._planner.compile_with(mode or options or True)

    def refuse_what_cannot_fit(self, custom_input: Any) -> None:
        """Raise InfeasibleError if parameters, gradients, optimizer state and batch exceed the limit.

        Does not run the model. The error's `min_bytes` is a lower bound, without activations. With several processes,
        logs a warning instead. The first training step checks this itself, as does the constructor if it gets an input
        and a limit.
        """
        with planning, in_training(self):
            self._planner.refuse_what_cannot_fit(*arguments_of(custom_input, self.model))

    def measure(self, custom_input: Any, *, closely: bool = False) -> None:
        """Measure the time and memory of every stage on `custom_input`, given as to the constructor.

        Measures in training mode. Restores parameters, gradients, buffers, random state and mode afterwards. With
        `closely`, repeats measurements until times are precise enough for `least_limit(..., max_overhead=...)`, which
        takes as long as up to 24 more plain steps.

        Raises UnsupportedModelError if the model cannot be cut into stages.
        """
        # Take the lock first: a thread that waits for it must not read the mode that another one sets only to measure.
        with planning, in_training(self):
            self._planner.measure(*arguments_of(custom_input, self.model), closely=closely)

    def build_chain(self, mem_limit: float | str | None = None) -> Chain:
        """Return the measured costs of the stages, in seconds and bytes. `mem_limit`, if given, is the new limit.

        Raises ValueError if nothing has been measured, or the limit is invalid.
        """
        if mem_limit is not None:
            self._planner.set_limit(mem_limit)
        return self._planner.in_use.budget.chain

    def compute_sequence(
        self,
        custom_mem_limit_bytes: float | str | None = None,
        mem_slots: int | None = None,
        algo: Algorithm | None = None,
        **algo_kwargs: Any,
    ) -> Sequence:
        """Find, set and return the sequence that steps follow. `algo` is an algorithm of `rotor_solver` or its class.

        Without `algo`, use the strategy set by hand, or else `Persistent()`. Raises InfeasibleError, whose `min_bytes`
        is the least limit that works, if no sequence fits; ValueError if nothing has been measured.
        """
        if isinstance(algo, type):
            algo = algo(**algo_kwargs)
        planner = self._planner
        return solve(planner.in_use, planner.model, custom_mem_limit_bytes, slots=mem_slots, algorithm=algo)

    def divide(self, budget: Budget) -> None:
        """Replace the plan's budget; the next forward solves for it. Raises ValueError if nothing has been measured."""
        plan = self._planner.in_use
        plan.budget, plan.sequence = budget, None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        make, arguments, state = super().__reduce_ex__(protocol)
        # Put the planner into the state, so that the model's copy and the planner's copy refer to each other.
        return make, arguments, {**state, "_planner": self._planner.copied()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # untyped in torch
        # Have the copy's planner detect optimizers: the weak tables that list such planners are not copied.
        self._planner.wait_for_optimizers()


def _refuse_parts(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the model, or a module in it, is a Checkpointable or a module of `torch.jit`."""
    for name, each in model.named_modules():
        part = f"submodule {name!r}" if name else "the model"
        if isinstance(each, Checkpointable):
            text = f"wrap the whole model or parts of it, each once: {part} is a Checkpointable already"
            raise UnsupportedModelError(text, kind="wrapped_twice", name=name or "model")
        if isinstance(each, torch.jit.ScriptModule):
            text = f"use {part} without torch.jit.script and torch.jit.trace: recomputations run modules with other "
            text += "parameters and buffers, which scripted ones cannot be given. Scripted functions may stay"
            raise UnsupportedModelError(text, kind="scripted", name=name or "model")
