"""`rotor-plan train.py -- arguments`: run a script up to its first training step, and plan that step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from rotor_cli.facts import Facts, Taken
from rotor_cli.failure import INFEASIBLE, MODEL_RAISED, USAGE, Failure, failed, raised_by, usage
from rotor_cli.model_file import ModelFile, batches_of
from rotor_cli.model_file_errors import EXAMPLE, REQUIRED_SAMPLE, defines_not, required_model
from rotor_cli.plan_command import facts_of, refuse_offload, solver_options
from rotor_cli.request import Request
from rotor_cli.target_device import Target
from rotor_py import InfeasibleError, UnsupportedModelError
from rotor_py.integrations.first_step import FirstStep, FirstTrainingStep, NoTrainingStepError
from rotor_py.measure.device import limit_bytes
from rotor_py.plan.step_spec import describe, spec_of
from rotor_py.report.progress import activities
from rotor_py.stage.forward_state import restored_autocast


class _Ended(BaseException):
    """Ends the script once its first training step is known. The script's `except Exception` does not stop it."""


@dataclass(slots=True)
class _Known:
    step: FirstStep | None = None
    facts: Facts | None = None
    failure: Failure | None = None
    """reason that the step cannot be planned"""


def plan_script(request: Request, deliver: Callable[[Facts], None]) -> Facts:
    """Run the script up to the first step of its optimizer, and deliver the plan for it; with `--run`, go on by it."""
    known = _Known()

    def plan(step: FirstStep) -> Facts:
        with activities(quiet=request.quiet) as shown, restored_autocast(step.autocast, cache=True):
            limit = limit_bytes(request.mem_limit, step.network.device) if request.limited else None
            model, sample, optimizer = step.network.model, step.sample, step.optimizer
            found = ModelFile(
                request.model, Path(request.model).name, model, sample, batches_of(None, sample, model), None, optimizer
            )
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
            facts = facts_of(
                found, step.network, limit, request, shown, target=Target(step.network.device), taken=taken
            )
        deliver(facts)
        return facts

    def stepping(step: FirstStep) -> None:
        known.step = step
        if not request.run:
            # Free the script's objects first, so that a verified step has the memory to itself.
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
            # The answer goes to stdout; the script's output does not, unless it is to run.
            printing = nullcontext() if request.run else redirect_stdout(sys.stderr)
            with printing, _ending(request, module, known), first.watched():
                run_script(module)
        finally:
            first.take_away()
        if known.failure is not None:
            raise known.failure
        if known.facts is None:
            assert known.step is not None
            known.step.network.model.to(known.step.network.device)  # some trainers move it away when they end
            known.facts = plan(known.step)
    return known.facts


@contextmanager
def _ending(request: Request, module: ModuleType, known: _Known) -> Iterator[None]:
    """Turn each ending of the script into an ending of this command."""
    name = Path(request.model).name
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if known.step is not None and known.facts is None:
            return  # this command ended the script, whatever error the script made of it
        match error:
            case NoTrainingStepError() if request.explicit_script:
                raise usage("no_training_step", name, f"{name} took no training step: {error}") from error
            case NoTrainingStepError():
                required = REQUIRED_SAMPLE if hasattr(module, "model") else required_model("model")
                message = f"{defines_not(request.model, vars(module), required)}; run as a script, {error}"
                message += f". A file that works:\n\n{EXAMPLE}"
                raise usage("no_training_step", request.model, message) from error
            case InfeasibleError():  # of a later and larger batch, in a script that runs
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
    """Install the `__main__` module that `run_script` fills, with the script's `sys.argv` and `sys.path`.

    Within the context it stays `__main__` after the script's end: measuring and child processes find it by that name.
    """
    file = str(Path(path).resolve())
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __loader__=SourceFileLoader("__main__", file), __builtins__=__builtins__)
    before, argv, folders = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    try:
        yield module
    finally:
        sys.modules["__main__"] = before
        sys.argv, sys.path[:] = argv, folders


def run_script(module: ModuleType) -> None:
    # Not by runpy, which clears the module at the script's end.
    file = str(module.__file__)
    exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)
