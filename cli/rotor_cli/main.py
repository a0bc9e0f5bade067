"""The command line. Heavy imports wait until they are needed: `--help` loads neither torch nor numba."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rotor_cli.errors import DIFFERENT, INFEASIBLE, INTERRUPTED, UNEXPECTED, USAGE, Failure, raised_by_model, usage

if TYPE_CHECKING:
    import torch

    from rotor_cli.facts import Facts
    from rotor_cli.model_file import ModelFile
    from rotor_py import Checkpointable

_EPILOG = """\b
Examples:
  rotor-plan model.py --mem-limit 4GB
  rotor-plan model.py --mem-limit 80% --batch 64 --verify
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
@click.option("--traceback", is_flag=True, help="Show tracebacks of unexpected errors.")
@click.version_option(package_name="rotor-plan")
def main(
    model: str,
    mem_limit: str | None,
    device: str | None,
    batch: int | None,
    shape: str | None,
    config: str | None,
    slots: int,
    fresh_grads: bool,
    verify: bool,
    json_file: str | None,
    plan_file: str | None,
    trace_file: str | None,
    html_file: str | None,
    traceback: bool,
) -> None:
    """Plan a training step of MODEL that stays inside a memory limit, at the least extra time.

    MODEL is file.py, file.py:name or package.module:name. A class of models of transformers, with --config, is made
    with random weights. Else it defines `model` (a module, or a function that returns
    one) and `sample` (a tensor, tuple or dict, or a function of the batch size that returns one); `loss` (a function
    of the output) and `optimizer` (a function of the parameters) are optional.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        _refuse_unwritable(json_file, stdout=True)
        for path in (plan_file, trace_file, html_file):
            _refuse_unwritable(path)
        facts = _plan(model, mem_limit, device, batch, shape, config, slots, fresh_grads, verify, plan_file)
        _write(facts, trace_file, html_file)
        _show(facts, json_file, plan_file)
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
    problem = facts.verified.problem(facts.mem_limit) if facts.verified is not None else None
    if problem is not None:
        raise Failure(problem, DIFFERENT)


def _plan(
    target: str,
    mem_limit: str | None,
    device_name: str | None,
    batch: int | None,
    shape: str | None,
    config: str | None,
    slots: int,
    fresh_grads: bool,
    verify: bool,
    plan_file: str | None,
) -> Facts:
    from rotor_cli.facts import Facts
    from rotor_cli.model_file import load
    from rotor_py import Checkpointable, InfeasibleError

    device = _device(device_name)
    limit = _limit(mem_limit, device)
    found = load(target, device, batch, shape, config)
    with _explained(found.file):
        network = Checkpointable(
            found.model,
            mem_limit=limit,
            mem_slots=slots,
            loss=found.loss or default_loss,
            optimizer=found.optimizer,
            fresh_grads=fresh_grads,
        )
        network.measure(found.sample)
    try:
        sequence = network.compute_sequence()
    except InfeasibleError as error:
        raise Failure(str(error), INFEASIBLE) from error
    if plan_file is not None:
        network.save_plan(plan_file)
    assert network.budget is not None
    assert network.inspection_values is not None
    return Facts(
        title=found.name,
        device=str(device),
        mem_limit=limit,
        budget=network.budget,
        measurement=network.inspection_values,
        sequence=sequence,
        arguments=(
            *(("loss=loss",) if found.loss else ()),
            *(("optimizer=optimizer",) if found.optimizer else ()),
            *(("fresh_grads=True",) if fresh_grads else ()),
        ),
        verified=_verify(network, found, device, fresh_grads) if verify else None,
    )


def _verify(network: Checkpointable, found: ModelFile, device: torch.device, fresh_grads: bool) -> Any:
    from rotor_cli.verify import verify

    with _explained(found.file):
        return verify(
            network, found.sample, found.loss or default_loss, found.optimizer, device, fresh_grads=fresh_grads
        )


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
    from rotor_py.device import DEFAULT_SHARE, available_bytes, total_bytes
    from rotor_py.units import parse_bytes

    if text is None:
        return int(DEFAULT_SHARE * available_bytes(device))
    try:
        return parse_bytes(text, device_bytes=total_bytes(device))
    except ValueError as error:
        raise usage(f"--mem-limit: {error}") from error


def _refuse_unwritable(path: str | None, *, stdout: bool = False) -> None:
    if path is None or (stdout and path == "-"):
        return
    if path == "-":
        raise usage("- stands for stdout, which only --json writes to; give the name of a file")
    folder = Path(str(path)).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(str(path)).is_dir():
        raise usage(f"{path} cannot be written: {folder} is not a folder in which files can be made")


def _write(facts: Facts, trace_file: str | None, html_file: str | None) -> None:
    if trace_file is not None:
        from rotor_cli.trace import trace

        Path(trace_file).write_text(json.dumps(trace(facts)) + "\n", encoding="utf-8")
    if html_file is not None:
        from rotor_cli.text_report import verified

        facts.to_html(html_file, remarks=(verified(facts).plain,) if facts.verified is not None else ())


def _show(facts: Facts, json_file: str | None, plan_file: str | None) -> None:
    from rotor_cli.text_report import console, render

    if json_file is not None:
        text = json.dumps(facts.as_json(), indent=1)
        if json_file == "-":
            click.echo(text)
            return
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    console().print(render(facts, saved_plan=plan_file))
