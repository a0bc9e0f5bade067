"""Make a `Facts` for a `Request`: load the model or run its script, measure, plan, compare, verify by real steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from rotor_cli.facts import Facts, Taken
from rotor_cli.failure import (
    INFEASIBLE,
    MODEL_RAISED,
    USAGE,
    Failure,
    about_option,
    failed,
    raised_by,
    usage,
    user_code,
)
from rotor_cli.model_file import ModelFile, batches_of, load
from rotor_cli.model_file_errors import EXAMPLE, REQUIRED_SAMPLE, defines_not, required_model
from rotor_cli.request import Request
from rotor_cli.target_device import Target, limit_on, target_of
from rotor_cli.text_report import console
from rotor_profiling.isolate import set_meanwhile, undoing
from rotor_py import Checkpointable, InfeasibleError, PlannedBatch, UnsupportedModelError, verify
from rotor_py.batch_size.choose import choose_among
from rotor_py.batch_size.measured_batches import MeasuredBatches, PredictedBatches
from rotor_py.estimation.cuda_autocast import region
from rotor_py.estimation.estimate import recurrent_layers
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_py.integrations.first_step import FirstStep, FirstTrainingStep, NoTrainingStepError
from rotor_py.measure.device import limit_bytes
from rotor_py.offload.open_tier import checked_name
from rotor_py.plan.planned_model import plan_of
from rotor_py.plan.settings import refuse_optimizer
from rotor_py.plan.step_spec import describe, spec_of
from rotor_py.report.progress import Activities, activities
from rotor_py.report.report import sweep_of
from rotor_py.report.sweep import BatchChoice
from rotor_py.report.terminal import stage_table
from rotor_py.stage.forward_state import restored_autocast
from rotor_py.validate.comparison import compare_at_limit, leanest_of_each
from rotor_py.validate.verification import default_loss
from rotor_solver import store_all, watched


def plan(request: Request) -> Facts:
    with activities(quiet=request.quiet) as shown:
        target = target_of(request)
        # Compute the limit before loading the model, which may take long: a bad limit is reported at once.
        limit, chosen = None, None
        if request.limited and request.overhead is None:
            with target.measuring():
                limit = limit_on(target.device, request.mem_limit)
        with nullcontext() if target.simulated is None else target.simulated.together():
            shown.doing("loading")(0, 0, request.model)
            found = load(request, target)
            if request.step_in_backward:
                if found.optimizer is None:
                    message = "define `optimizer` in the model file: --step-in-backward needs one"
                    raise usage("no_optimizer", "--step-in-backward", message)
                with about_option("--step-in-backward"):
                    refuse_optimizer(found.optimizer)
            with target.measuring():
                refuse_offload(request)
                # Inside `user_code`, since `measuring` has to replace errors of operators that read values first.
                with user_code(found.file), target.measuring():
                    if request.batch_aim is None:
                        network = _measured_network(found, limit, request, shown, target)
                    else:
                        chosen = _choose(found, limit, request, shown, target)
                        limit, network = chosen.mem_limit, chosen.network
                if chosen is not None:
                    found = replace(found, sample=found.sample_of(chosen.batch))
                return facts_of(found, network, limit, request, shown, chosen=chosen, target=target)


def facts_of(
    found: ModelFile,
    network: Checkpointable,
    limit: int | None,
    request: Request,
    shown: Activities,
    *,
    target: Target,
    chosen: BatchChoice | None = None,
    taken: Taken | None = None,
) -> Facts:
    """Plan `network`, which is measured on the sample of `found`; sweep, compare and verify it as `request` asks."""
    facts = replace(_stored(found, network, request), batches=chosen, taken=taken)
    simulated = target.simulated
    if simulated is not None:
        recurrent = recurrent_layers(network.model, simulated.devices.each)
        facts = replace(facts, device=simulated.devices.name, predicted_for=simulated.devices, recurrent=recurrent)
    if request.sweep or request.overhead is not None:
        others = leanest_of_each(facts, network.model, request.slots, shown.doing("sweeping"))
        with watched(shown.doing("sweeping")):
            facts = replace(facts, sweep=sweep_of(facts, request.slots, others, request.overhead))
    if request.limited:
        with watched(shown.doing("solving")):
            facts = _plan(facts, network, limit, request)
        if simulated is not None:
            shown.doing("simulating")(0, 0, "a planned step")
            with user_code(found.file), target.measuring():
                facts = _reserve(facts, network, found, request, target)
    if request.plan_file is not None:
        with region(target.autocast):  # `save_plan` records the autocast that is active when it is called
            network.save_plan(request.plan_file)
    if request.compare:
        compared = compare_at_limit(facts, network.model, request.slots, shown.doing("comparing"))
        facts = replace(facts, compared=compared)
    if not request.verify:
        return facts
    with user_code(found.file):
        results = verify(
            network,
            found.sample,
            loss=found.loss,
            optimizer=found.optimizer,
            others=[each.sequence for each in facts.compared[1:] if each.fits],
            operations=request.trace_file is not None,
            progress=shown.doing("verifying:"),
        )
    measured = iter(results)
    compared = tuple(replace(each, verified=next(measured)) if each.fits else each for each in facts.compared)
    return replace(facts, verified=results[0], compared=compared)


def _step(network: Checkpointable, found: ModelFile, request: Request, target: Target) -> SimulatedStep:
    loss = found.loss or default_loss
    return SimulatedStep(network, found.sample, loss, found.optimizer, request.fresh_grads, target.autocast)


def _stored(found: ModelFile, network: Checkpointable, request: Request) -> Facts:
    """Return the facts of storing everything, with its peak as limit; `_plan` then replaces sequence and limit."""
    plan = plan_of(network)
    stored = store_all(plan.budget.chain)
    forwards, order = network.forwards_in_flight, request.backward_order
    arguments = {
        "loss=loss": found.loss is not None,
        f"{'step_in_backward' if request.step_in_backward else 'optimizer'}=optimizer": found.optimizer is not None,
        "fresh_grads=True": network.fresh_grads,
        f"forwards_in_flight={forwards}": forwards > 1,
        f"backward_order={order!r}": forwards > 1 and order != "any",
        "compile=True": request.compile,
        f'keep="{request.keep}"': request.keep is not None,
        f"offload={request.offload!r}": request.offload is not None,
    }
    return Facts(
        title=found.name,
        device=str(network.device),
        mem_limit=plan.budget.peak_bytes(stored),
        budget=plan.budget,
        measurement=plan.measurement,
        sequence=stored,
        arguments=tuple(argument for argument, given in arguments.items() if given),
        limited=request.limited,
        compiled=network.compiled if request.compile else None,
    )


def _plan(facts: Facts, network: Checkpointable, limit: int | None, request: Request) -> Facts:
    if request.overhead is not None and facts.sweep is not None:
        point = facts.sweep.least_for(request.overhead)  # the sweep has made this plan
        network.mem_limit, network.sequence = point.mem_limit, point.sequence
        return replace(facts, mem_limit=point.mem_limit, sequence=point.sequence)
    assert limit is not None
    try:
        sequence = network.compute_sequence()
    except InfeasibleError as error:
        if not request.quiet:
            # Stage costs show which layer to split. They go to stderr, since a program may parse stdout.
            console(stderr=True).print(stage_table(facts, costs_alone=True), "", sep="\n")
        raise failed(error, INFEASIBLE) from error
    # Planning decides by the limit which stages are compiled, so it may have changed budget and stage costs.
    plan = plan_of(network)
    found = replace(facts, budget=plan.budget, measurement=plan.measurement)
    return replace(found, mem_limit=limit, sequence=sequence, compiled=network.compiled if request.compile else None)


def _reserve(facts: Facts, network: Checkpointable, found: ModelFile, request: Request, target: Target) -> Facts:
    """Predict the bytes that the allocator reserves; if they exceed the device, lower the limit unless it was given."""
    keep_limit = request.mem_limit is not None or request.overhead is not None
    assert target.simulated is not None
    reserved = target.simulated.reserve(_step(network, found, request, target), keep_limit=keep_limit)
    plan, limit = plan_of(network), limit_bytes(network.mem_limit, network.device)
    return replace(facts, reserved=reserved, mem_limit=limit, budget=plan.budget, sequence=plan.followed)


def solver_options(request: Request) -> dict[str, Any]:
    """Return the arguments of `Checkpointable` that options of the command set directly."""
    return {
        "mem_slots": request.slots,
        "forwards_in_flight": request.forwards_in_flight,
        "backward_order": request.backward_order,
        "cache": not request.no_cache,
        "keep": request.keep,
        "offload": request.offload,
    }


def options_of(found: ModelFile, request: Request, shown: Activities) -> dict[str, Any]:
    return {
        "loss": found.loss or default_loss,  # as in `verify`, so that predicted and measured steps have the same loss
        "optimizer": found.optimizer,
        "fresh_grads": request.fresh_grads,
        "progress": shown.doing("measuring"),
        **solver_options(request),
    }


def _measured_network(
    found: ModelFile, limit: int | None, request: Request, shown: Activities, target: Target
) -> Checkpointable:
    """Return the measured model. Raises InfeasibleError before measuring if no plan can fit into `limit` bytes."""
    network = Checkpointable(
        found.model,
        mem_limit=limit,
        compile=request.compile,
        step_in_backward=found.optimizer if request.step_in_backward else None,
        **options_of(found, request, shown),
    )
    if request.limited and request.overhead is None:
        network.refuse_what_cannot_fit(found.sample)
    with region(target.autocast):
        network.measure(found.sample, closely=request.overhead is not None)
    if target.simulated is not None:
        target.simulated.follow(_step(network, found, request, target))
    return network


def refuse_offload(request: Request) -> None:
    if request.offload is not None:
        with about_option("--offload"):
            checked_name(request.offload)


def _choose(found: ModelFile, limit: int | None, request: Request, shown: Activities, target: Target) -> PlannedBatch:
    options = options_of(found, request, shown)
    if target.simulated is None:
        batches = MeasuredBatches(found.model, found.sample_of, limit, **options)
    else:
        batches = PredictedBatches(target.simulated, target.autocast, found.model, found.sample_of, limit, **options)
    return choose_among(
        request.batch_aim or "best",
        batches,
        multiple=request.batch_multiple,
        effective_batch=request.grad_accumulation,
        keep_limit=request.mem_limit is not None,
    )


# `rotor-plan train.py -- arguments`: run a script up to its first training step, and plan that step.


class _Ended(BaseException):
    """Raised in the script to end it before its first optimizer step; its `except Exception` does not catch this."""


@dataclass(slots=True)
class _Known:
    step: FirstStep | None = None
    facts: Facts | None = None
    failure: Failure | None = None  # why the step cannot be planned; raised when the script has ended


def plan_script(request: Request, deliver: Callable[[Facts], None]) -> Facts:
    """Run the script up to its first optimizer step, plan the step, `deliver` the facts; with --run, let it go on."""
    known = _Known()

    def plan(step: FirstStep) -> Facts:
        with activities(quiet=request.quiet) as shown, restored_autocast(step.autocast, cache=True):
            limit = limit_bytes(request.mem_limit, step.network.device) if request.limited else None
            model, sample, optimizer = step.network.model, step.sample, step.optimizer
            name, scaled = Path(request.model).name, batches_of(None, sample, model)
            found = ModelFile(request.model, name, model, sample, scaled, None, optimizer)
            taken = Taken(
                script=request.model,
                arguments=request.script_arguments or (),
                model=type(model).__name__,
                trained=sum(each.numel() for each in model.parameters() if each.requires_grad),
                input=describe(spec_of(sample)),
                optimizer=None if optimizer is None else type(optimizer).__name__,
                own_loss=step.own_loss,
                others=tuple(type(each).__name__ for each in step.others),
            )
            target = Target(step.network.device)
            facts = facts_of(found, step.network, limit, request, shown, target=target, taken=taken)
        deliver(facts)
        return facts

    def stepping(step: FirstStep) -> None:
        known.step = step
        if not request.run:
            # End the script and plan then: its freed objects leave more memory for the steps of --verify.
            raise _Ended
        try:
            known.facts = plan(step)
        except Failure as failure:
            known.failure = failure
            raise _Ended from None

    refuse_offload(request)
    first = FirstTrainingStep(
        stepping,
        request.mem_limit,
        {"progress": False if request.quiet else None, "compile": request.compile, **solver_options(request)},
        limited=request.limited and request.overhead is None,
        closely=request.overhead is not None,
    )
    with main_module(request.model, request.script_arguments or ()) as module:
        try:
            # Without --run, stdout is for the report, and what the script prints goes to stderr.
            printing = nullcontext() if request.run else redirect_stdout(sys.stderr)
            with printing, _ending(request, module, known), first.watched():
                run_script(module)
        finally:
            first.take_away()
        if known.failure is not None:
            raise known.failure
        if known.facts is None:
            assert known.step is not None
            known.step.network.model.to(known.step.network.device)  # some trainers end by moving the model to the CPU
            known.facts = plan(known.step)
    return known.facts


@contextmanager
def _ending(request: Request, module: ModuleType, known: _Known) -> Iterator[None]:
    """Within the context, turn an error of the script, or its exit before a step is planned, into a `Failure`."""
    name = Path(request.model).name
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if known.step is not None and known.facts is None:
            return  # `stepping` has raised `_Ended`, which the script may have turned into another error
        match error:
            case NoTrainingStepError() if request.explicit_script:
                raise usage("no_training_step", name, f"{name} took no training step: {error}") from error
            case NoTrainingStepError():
                required = REQUIRED_SAMPLE if hasattr(module, "model") else required_model("model")
                message = f"{defines_not(request.model, vars(module), required)}; run as a script, {error}"
                message += f". A file that works:\n\n{EXAMPLE}"
                raise usage("no_training_step", request.model, message) from error
            case InfeasibleError():  # with --run, for a later, larger batch
                raise failed(error, INFEASIBLE) from error
            case UnsupportedModelError():
                raise failed(error) from error
            case SystemExit() if known.facts is not None:
                raise
            case SystemExit(code=status):
                said = f" and {status!r}" if isinstance(status, str) else f" with exit status {status or 0}"
                message = f"{name} ended by itself{said} before its first training step"
                raise Failure(message, MODEL_RAISED if status else USAGE, kind="script_exited", name=name) from error
            case _:
                raise raised_by(request.model, error, request.model, "script_raised", chain=True) from error


@contextmanager
def main_module(path: str, arguments: tuple[str, ...]) -> Iterator[ModuleType]:
    """Within the context, `__main__`, `sys.argv` and `sys.path` are the script's, as with `python FILE`."""
    file = str(Path(path).resolve())
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __loader__=SourceFileLoader("__main__", file), __builtins__=__builtins__)
    script = {"argv": [path, *arguments], "path": [str(Path(file).parent), *sys.path]}
    with undoing() as undo, set_meanwhile((sys, script)):
        undo.append(partial(sys.modules.__setitem__, "__main__", sys.modules["__main__"]))
        sys.modules["__main__"] = module
        yield module


def run_script(module: ModuleType) -> None:
    # Not by runpy, which clears the script's globals at its end: the model's functions may still read them.
    file = str(module.__file__)
    exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)
