"""The command line. Heavy imports wait until they are needed: `--help` loads neither torch nor numba."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rotor_cli.errors import DIFFERENT, INFEASIBLE, INTERRUPTED, UNEXPECTED, USAGE, Failure, raised_by_model, usage
from rotor_cli.request import Request

if TYPE_CHECKING:
    import torch

    from rotor_cli.facts import Facts
    from rotor_cli.loading.model_file import ModelFile
    from rotor_py import Checkpointable
    from rotor_py.report.progress import Activities

_EPILOG = """\b
Examples:
  rotor-plan model.py --mem-limit 4GB
  rotor-plan model.py --mem-limit 80% --batch 64 --verify
  rotor-plan model.py --mem-limit 4GB --compare
  rotor-plan model.py --sweep --plot curve.svg
  rotor-plan model.py --max-overhead 10%
  rotor-plan model.py:encoder --mem-limit 512MiB --input 32,3,224,224
  rotor-plan package.models:net --mem-limit 4GB --json - | jq .plan
  rotor-plan transformers:LlamaForCausalLM --config '{"num_hidden_layers": 8}' --input 4,512:int64 --mem-limit 8GB

\b
Exit codes: 0 planned; 1 unexpected error; 2 wrong usage or an unusable model file; 3 no plan fits;
4 the model itself raised; 5 --verify found a difference; 130 interrupted.
"""


@click.command(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("model")
@click.option(
    "--mem-limit", metavar="LIMIT", help="Peak of the whole step: 4GB, 512MiB, 80%. [default: 90% of what is free]"
)
@click.option(
    "--max-overhead", metavar="SHARE", help="Instead of a limit: the least one that costs at most 10% more time."
)
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. [default: cuda where there is one]")
@click.option("--batch", type=int, metavar="N", help="Number of samples in a batch.")
@click.option("--input", "shape", metavar="SHAPE", help="Replace `sample`: 32,3,224,224, or 8,128:int64.")
@click.option(
    "--config", metavar="JSON", help="For a model class of transformers: its configuration, as JSON or a file of it."
)
@click.option(
    "--slots", type=click.IntRange(min=1), default=500, show_default=True, help="How finely memory is divided."
)
@click.option("--fresh-grads", is_flag=True, help="Gradients are freed between steps: zero_grad(set_to_none=True).")
@click.option(
    "--verify", is_flag=True, help="Train one step, and compare peak, time and gradients with the plain step."
)
@click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON; - is stdout.")
@click.option("--save", "plan_file", metavar="FILE", help="Write the plan for Checkpointable(model, plan=FILE).")
@click.option("--trace", "trace_file", metavar="FILE", help="Write the predicted step as a trace, for Perfetto.")
@click.option("--html", "html_file", metavar="FILE", help="Write the report as one page that loads nothing.")
@click.option("--compare", is_flag=True, help="Every strategy at this limit, in one table; --verify measures them too.")
@click.option("--sweep", is_flag=True, help="The curve of memory against time; needs no --mem-limit.")
@click.option("--plot", "plot_file", metavar="FILE", help="Draw the curve of --sweep as FILE.svg or FILE.png.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on the terminal while it works.")
@click.option("--traceback", is_flag=True, help="Show tracebacks of unexpected errors.")
@click.version_option(package_name="rotor-plan")
def main(traceback: bool, **options: Any) -> None:
    """Plan a training step of MODEL that stays inside a memory limit, at the least extra time.

    MODEL is file.py, file.py:name or package.module:name. A class of models of transformers, with --config, is made
    with random weights. Else it defines `model` (a module, or a function that returns
    one) and `sample` (a tensor, tuple or dict, or a function of the batch size that returns one); `loss` (a function
    of the output) and `optimizer` (a function of the parameters) are optional.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    request = Request(**options)
    try:
        request.refuse_wrong_use()
        facts = _worked_out(request)
        _write(facts, request)
        _show(facts, request)
    except Failure:
        raise
    except KeyboardInterrupt:
        click.echo("rotor-plan: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if traceback:
            raise
        raise Failure(
            f"unexpected error: {type(error).__name__}: {error} (--traceback shows where)", UNEXPECTED
        ) from error
    problem = facts.problem()
    if problem is not None:
        raise Failure(problem, DIFFERENT)


def _worked_out(request: Request) -> Facts:
    """All facts; on a terminal, with a line about what is being done."""
    from rotor_py.report.progress import activities

    with activities(quiet=request.quiet) as shown:
        return _plan(request, shown)


def _plan(request: Request, shown: Activities) -> Facts:
    from rotor_cli.facts import Facts
    from rotor_cli.loading.model_file import load
    from rotor_py import Checkpointable
    from rotor_solver import store_all, watched

    device = _device(request.device)
    by_limit = request.limited and request.overhead is None
    limit = _limit(request.mem_limit, device) if by_limit else None
    shown.doing("loading")(0, 0, request.model)
    found = load(request.model, device, request.batch, request.shape, request.config)
    with _explained(found.file):
        network = Checkpointable(
            found.model,
            mem_limit=limit,
            mem_slots=request.slots,
            loss=found.loss or default_loss,
            optimizer=found.optimizer,
            fresh_grads=request.fresh_grads,
            progress=shown.doing("measuring"),
        )
        network.measure(found.sample)
    assert network.budget is not None
    assert network.inspection_values is not None
    facts = Facts(
        title=found.name,
        device=str(device),
        mem_limit=network.budget.peak_bytes(store_all(network.budget.chain)),
        budget=network.budget,
        measurement=network.inspection_values,
        sequence=store_all(network.budget.chain),
        arguments=(
            *(("loss=loss",) if found.loss else ()),
            *(("optimizer=optimizer",) if found.optimizer else ()),
            *(("fresh_grads=True",) if request.fresh_grads else ()),
        ),
        limited=request.limited,
    )
    if request.sweep or request.overhead is not None:
        facts = _swept(facts, network, request, shown)
    if request.limited:
        with watched(shown.doing("solving")):
            facts = _planned(facts, network, limit, request)
    if request.plan_file is not None:
        network.save_plan(request.plan_file)
    if request.compare:
        from rotor_py.trials.compare import compare

        compared = compare(facts, network.model, request.slots, shown.doing("comparing"))
        facts = replace(facts, compared=compared)
    return _verified(facts, network, found, device, request, shown) if request.verify else facts


def _swept(facts: Facts, network: Checkpointable, request: Request, shown: Activities) -> Facts:
    from rotor_py.report.sweep import sweep
    from rotor_py.trials.compare import leanest_of_each
    from rotor_solver import watched

    others = leanest_of_each(facts, network.model, request.slots, shown.doing("sweeping"))
    with watched(shown.doing("sweeping")):
        return replace(facts, sweep=sweep(facts, request.slots, others))


def _planned(facts: Facts, network: Checkpointable, limit: int | None, request: Request) -> Facts:
    """With the plan for `limit`, or else for the time that is allowed."""
    from rotor_py import InfeasibleError

    if request.overhead is not None:
        assert facts.sweep is not None
        point = facts.sweep.least_for(request.overhead)
        network.mem_limit, network.sequence = point.mem_limit, point.sequence
        limit, sequence = point.mem_limit, point.sequence
    else:
        assert limit is not None
        try:
            sequence = network.compute_sequence()
        except InfeasibleError as error:
            raise Failure(str(error), INFEASIBLE) from error
    return replace(facts, mem_limit=limit, sequence=sequence)


def _verified(
    facts: Facts,
    network: Checkpointable,
    found: ModelFile,
    device: torch.device,
    request: Request,
    shown: Activities,
) -> Facts:
    from rotor_py.trials.compare import with_verified
    from rotor_py.trials.verify import verify

    others = [row.sequence for row in facts.compared[1:] if row.fits]
    loss, fresh = found.loss or default_loss, request.fresh_grads
    with _explained(found.file):
        results = verify(
            network,
            found.sample,
            loss,
            found.optimizer,
            device,
            fresh_grads=fresh,
            others=others,
            operations=request.trace_file is not None,
            progress=shown.doing("verifying:"),
        )
    return replace(facts, verified=results[0], compared=with_verified(facts.compared, results))


def default_loss(output: Any) -> torch.Tensor:
    """The model's own loss if it returns one, else the mean of squares."""
    import torch

    from rotor_profiling import tensors_in

    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own
    parts = [t.square().mean() for t in tensors_in(output) if t.requires_grad]
    if not parts:
        raise usage(
            "the model's output does not depend on anything that needs a gradient, so there is nothing to train"
        )
    return sum(parts[1:], parts[0])


@contextlib.contextmanager
def _explained(file: str) -> Iterator[None]:
    """Tell apart what the model raises from what we say about it."""
    from rotor_profiling import UnknownOptimizerError, UnusableLossError
    from rotor_py import UnsupportedModelError

    try:
        yield
    except Failure:
        raise
    except (UnsupportedModelError, UnusableLossError, UnknownOptimizerError) as error:
        raise Failure(str(error), USAGE) from error
    except Exception as error:
        raise raised_by_model(error, file) from error


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise usage(f"--device {name!r} is not a device to plan for; write cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise usage(f"--device {name!r} is not there: PyTorch sees {count} CUDA devices")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")


def _limit(text: str | None, device: torch.device) -> int:
    from rotor_py.measure.device import limit_bytes

    try:
        return limit_bytes(text, device)
    except ValueError as error:
        raise usage(f"--mem-limit: {error}") from error


def _write(facts: Facts, request: Request) -> None:
    if request.trace_file is not None:
        from rotor_cli.reporters.trace import trace

        Path(request.trace_file).write_text(json.dumps(trace(facts)) + "\n", encoding="utf-8")
    if request.html_file is not None:
        from rotor_cli.reporters.text import verified

        facts.to_html(request.html_file, remarks=(verified(facts).plain,) if facts.verified is not None else ())


def _show(facts: Facts, request: Request) -> None:
    from rotor_cli.reporters.comparison import Comparison
    from rotor_cli.reporters.sweep import curve, plot
    from rotor_cli.reporters.text import console, render

    if request.plot_file is not None and facts.sweep is not None:
        plot(facts.sweep, request.plot_file, facts.title)
    if request.json_file is not None:
        text = json.dumps(facts.as_json(), indent=1)
        if request.json_file == "-":
            click.echo(text)
            return
        Path(request.json_file).write_text(text + "\n", encoding="utf-8")
    out = console()
    if facts.limited:
        out.print(render(facts, saved_plan=request.plan_file))
    if facts.compared:
        out.print("", Comparison(facts.compared), sep="\n")
    if request.sweep and facts.sweep is not None:
        out.print(*([""] if facts.limited else []), curve(facts.sweep, facts.title, request.overhead), sep="\n")
