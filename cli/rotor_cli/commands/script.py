"""`rotor-plan train.py -- arguments`: a user's own script up to its first training step, and the plan for that step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType

from rotor_cli.commands.plan import facts_of
from rotor_cli.errors import MODEL_RAISED, USAGE, Failure, raised_by_script, usage
from rotor_cli.facts import Facts, Taken
from rotor_cli.loading.model_file import ModelFile, what_is_missing
from rotor_cli.loading.sample import batches_of
from rotor_cli.loading.script import main_module, run_script
from rotor_cli.request import Request
from rotor_py import UnsupportedModelError
from rotor_py.measure.device import limit_bytes
from rotor_py.plan.inputs.input_spec import describe, spec_of
from rotor_py.report.progress import activities
from rotor_py.stage.autocast import restored_autocast
from rotor_py.trainers.first_step import FirstTrainingStep, NoTrainingStepError
from rotor_py.trainers.followed_model import FirstStep


class _Ended(BaseException):
    """Ends the script where its first training step is known. No `except Exception` of the script stops it."""

    def __init__(self, failure: Failure | None = None) -> None:
        super().__init__()
        self.failure = failure


def plan_script(request: Request, deliver: Callable[[Facts], None]) -> Facts:
    """Run the script up to the first step of its optimizer, and have the plan for it delivered.

    With `--run` the script then goes on by the plan, and ends as it ends by itself. Failure, with the exit code that
    the command's help names, if it takes no training step, or none that can be planned.
    """
    found: list[Facts] = []

    def plan(step: FirstStep) -> None:
        with activities(quiet=request.quiet) as shown, restored_autocast(step.autocast, cache=True):
            limit = limit_bytes(request.mem_limit, step.network.device) if request.limited else None
            facts = facts_of(_file_of(step, request), step.network, limit, request, shown, taken=_taken(step, request))
        deliver(facts)
        found.append(facts)

    steps: list[FirstStep] = []

    def stepping(step: FirstStep) -> None:
        if not request.run:
            # What the script holds is let go of first: a step that is verified finds the memory that it has alone.
            steps.append(step)
            raise _Ended
        try:
            plan(step)
        except Failure as failure:
            raise _Ended(failure) from None

    first = FirstTrainingStep(
        stepping,
        request.mem_limit,
        {
            "mem_slots": request.slots,
            "forwards_in_flight": request.forwards_in_flight,
            "backward_order": request.backward_order,
            "progress": False if request.quiet else None,
            "cache": not request.no_cache,
            "compile": request.compile,
        },
    )
    with main_module(request.model, request.script_arguments or ()) as module:
        try:
            # The answer goes to stdout; what the script prints on its way does not, unless it is to run.
            printing = nullcontext() if request.run else redirect_stdout(sys.stderr)
            with printing, _ending(request, module, found), first.watched(), _script_code(request):
                run_script(module)
        finally:
            first.take_away()
        for step in steps:
            step.network.model.to(step.network.device)  # some trainers move it away when they end
            plan(step)
    return found[0]


@contextmanager
def _ending(request: Request, module: ModuleType, found: list[Facts]) -> Iterator[None]:
    """Turn each way in which the script may end into an end of this command."""
    name = Path(request.model).name
    try:
        yield
    except _Ended as ended:
        if ended.failure is not None:
            raise ended.failure from None
    except NoTrainingStepError as error:
        if request.explicit_script:
            raise usage(f"{name} took no training step: {error}") from error
        missing, example = what_is_missing(request.model, module)
        raise usage(f"{missing}; run as a script, {error}. A file that works:\n\n{example}") from error
    except UnsupportedModelError as error:
        raise Failure(str(error), USAGE) from error
    except SystemExit as error:
        if found:
            raise
        status = error.code
        said = f" and {status!r}" if isinstance(status, str) else f" with exit status {status or 0}"
        raise Failure(
            f"{name} ended by itself{said} before its first training step", MODEL_RAISED if status else USAGE
        ) from error


@contextmanager
def _script_code(request: Request) -> Iterator[None]:
    """Tell what the script raises from what is said about it."""
    try:
        yield
    except (Failure, UnsupportedModelError):
        raise
    except Exception as error:
        raise raised_by_script(error, request.model) from error


def _file_of(step: FirstStep, request: Request) -> ModelFile:
    """What the script has shown, as a model file would define it."""
    model, sample = step.network.model, step.sample
    return ModelFile(
        file=request.model,
        name=Path(request.model).name,
        model=model,
        sample=sample,
        sample_of=batches_of(None, sample, model),
        loss=None,
        optimizer=step.optimizer,
    )


def _taken(step: FirstStep, request: Request) -> Taken:
    model = step.network.model
    return Taken(
        script=request.model,
        arguments=request.script_arguments or (),
        model=type(model).__name__,
        trained=sum(each.numel() for each in model.parameters() if each.requires_grad),
        input=describe(spec_of(step.sample)),
        optimizer=None if step.optimizer is None else type(step.optimizer).__name__,
        own_loss=step.own_loss,
        others=tuple(type(each).__name__ for each in step.others),
    )
