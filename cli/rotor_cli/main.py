"""Declare the options of `rotor-plan`, and run it. Printing `--help` imports neither torch nor numba."""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import click

from rotor_cli.failure import DIFFERENT, INTERRUPTED, UNEXPECTED, Failure
from rotor_cli.request import Request, batch_of, refuse_wrong_use

_EPILOG = """\b
Examples:
  rotor-plan model.py --mem-limit 4GB
  rotor-plan model.py --mem-limit 80% --batch 64 --verify
  rotor-plan model.py --mem-limit 24GB --batch best --batch-multiple 8
  rotor-plan model.py --mem-limit 4GB --compare
  rotor-plan model.py --sweep --plot curve.svg
  rotor-plan model.py --max-overhead 10%
  rotor-plan model.py --pipeline 4 --microbatches 16 --mem-limit 4GB
  rotor-plan train.py --mem-limit 4GB -- --epochs 3
  rotor-plan model.py:encoder --mem-limit 512MiB --input 32,3,224,224
  rotor-plan package.models:net --mem-limit 4GB --json - | jq .plan
  rotor-plan transformers:LlamaForCausalLM --config '{"num_hidden_layers": 8}' --input 4,512:int64 --mem-limit 8GB
  rotor-plan model.py --device h100 --optimizer adamw-fused --dtype bfloat16

\b
Exit codes: 0 planned; 1 unexpected error; 2 wrong usage or an unusable model file; 3 no plan fits;
4 the model itself raised; 5 --verify found a difference; 130 interrupted.
"""

# Options, and for each the unknown names that users try for it; an error for such a name suggests the option
_OPTION_ALIASES = {
    "--mem-limit": ("budget", "memory", "mem", "limit", "memory-limit", "memory-budget", "mem-budget", "max-memory"),
    "--batch": ("batch-size", "bs"),
    "--input": ("shape", "input-shape", "sample"),
    "--max-overhead": ("overhead", "max-slowdown"),
    "--forwards-in-flight": ("in-flight", "forwards"),
    "--save": ("output", "out", "plan"),
    "--device": ("gpu", "cuda"),
}
# Modes of torch.compile. Copied, as `--compile MODE` is refused before torch, which lists them, is imported.
_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class CommandWithAliases(click.Command):
    """Command that suggests options by meaning, such as --mem-limit for --budget; click suggests by similar letters."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but pass the arguments after `--` to the script, and refuse `--compile MODE`."""
        script: tuple[str, ...] | None = None
        if "--" in args:
            args, script = args[: args.index("--")], tuple(args[args.index("--") + 1 :])
        if any(one == "--compile" and other in _COMPILE_MODES for one, other in pairwise(args)):
            raise click.UsageError(
                "--compile takes no mode and uses Inductor's defaults; for another mode (without CUDA graphs), write "
                'Checkpointable(..., compile="max-autotune-no-cudagraphs") in your code.',
                ctx=ctx,
            )
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("_", "-")
            for option, others in _OPTION_ALIASES.items():
                if name in others:
                    error.possibilities = [option]  # type: ignore[misc] # Final
            raise
        ctx.params["script_arguments"] = script
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]


def _calibrate(context: click.Context, option: click.Parameter, device: str | None) -> None:
    """Measure `device` and exit as soon as --calibrate is parsed, so that the command needs no MODEL."""
    if device is None or context.resilient_parsing:
        return
    from rotor_cli.target_device import print_calibration

    print_calibration(device or None)
    context.exit()


_flag = partial(click.option, is_flag=True)
_file = partial(click.option, metavar="FILE", type=click.Path())
_number = partial(click.option, type=click.IntRange(min=1), show_default=True)


@click.command(
    cls=CommandWithAliases,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("model", type=click.Path())
@click.option("--mem-limit", metavar="LIMIT", help="Limit of the step's peak: 4GB, 512MiB, 80%. [default: 90% of free]")
@click.option("--max-overhead", metavar="SHARE", help="Find the least limit at which plans take at most 10% more time.")
@click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, cuda or cuda:N; or a device to simulate: h100, a100-80, h100:8 (FSDP2 over eight), … "
    "[default: cuda if present]",
)
@click.option("--device-memory", metavar="SIZE", help="Simulate a device with this much memory.")
@_file("--device-file", help="Simulate the device that FILE, as printed by --calibrate, describes.")
@click.option("--dtype", metavar="DTYPE", help="Convert model and input to bfloat16, float16 or float32.")
@click.option("--precision", metavar="DTYPE", help="With --device h100:8: DTYPE in which FSDP2 gathers and computes.")
@click.option(
    "--shard",
    type=click.Choice(["blocks", "whole"]),
    help="With --device h100:8: FSDP2 gathers parameters block by block, or all at once.  [default: blocks]",
)
@click.option("--autocast", metavar="DTYPE", help="On a simulated device: run steps under torch.autocast(DTYPE).")
@click.option("--optimizer", metavar="NAME", help="Replace the file's optimizer by adamw, adamw-fused, sgd-momentum, …")
@click.option(
    "--batch",
    callback=lambda context, option, text: batch_of(text),
    metavar="N|max|best",
    help="Batch size; max: the largest that fits, best: the one with the most samples a second.",
)
@_number("--batch-multiple", default=1, metavar="N", help="For --batch max or best: try only multiples of N.")
@_number("--grad-accumulation", metavar="SAMPLES", help="Samples in an optimizer step, for --batch max or best.")
@click.option("--input", metavar="SHAPE", help="Make `sample` a tensor of this shape: 32,3,224,224, or 8,128:int64.")
@click.option("--config", metavar="JSON", help="Configuration of a model class of transformers, as JSON or a file.")
@_number("--slots", default=500, help="Number of memory units for the solver: more find better plans, but slower.")
@_flag("--fresh-grads", help="Plan for a loop that frees gradients between steps: zero_grad(set_to_none=True).")
@_flag("--step-in-backward", help="Step each parameter in the backward, as Checkpointable(step_in_backward=) does.")
@click.option(
    "--keep",
    type=click.Choice(["bf16", "fp8", "int8"]),
    help="Let stages save activations in fewer bits; gradients then differ from plain training's.",
)
@_number("--forwards-in-flight", default=1, help="Number of forwards that run before the first backward.")
@click.option(
    "--backward-order",
    type=click.Choice(["any", "reverse"]),
    default="any",
    show_default=True,
    help="Order of backwards if several forwards are in flight; reverse, as for a sum of losses, allows faster plans.",
)
@_flag("--verify", help="Train steps by the plan; compare peak, time and gradients with plain steps.")
@_flag("--compile", help="Compile stages with Inductor if that makes the plan faster.")
@click.option(
    "--offload", metavar="TIER", help="Offload activations, if that is faster, to file:/path or to host (for CUDA)."
)
@_flag("--no-cache", help="Neither read nor write the cache of measurements.")
@_file("--json", "json_file", help="Write the report as JSON; - is stdout.")
@_file("--save", "plan_file", help="Write the plan for Checkpointable(model, plan=FILE).")
@_file("--trace", "trace_file", help="Write the predicted step as a trace, for Perfetto.")
@_file("--html", "html_file", help="Write the report as one self-contained HTML page.")
@_flag("--compare", help="Compare the plan with other strategies at its limit; --verify measures those that fit.")
@_flag("--sweep", help="Show the curve of time against memory over all limits.")
@_file("--plot", "plot_file", help="Draw the curve of --sweep as FILE.svg or FILE.png.")
@_number("--pipeline", metavar="RANKS", help="Cut the model into a pipeline over RANKS processes, and plan each.")
@_number("--microbatches", metavar="M", help="Number of microbatches in a step. [default: 2 for each rank]")
@click.option(
    "--schedule", default="1f1b", show_default=True, help="Pipeline schedule: gpipe, 1f1b, interleaved, zero-bubble, …"
)
@_number("--virtual-stages", metavar="V", help="Number of parts of the model on each rank. [interleaved: 2]")
@click.option(
    "--calibrate",
    is_flag=False,
    flag_value="",
    is_eager=True,
    expose_value=False,
    callback=_calibrate,
    metavar="[DEVICE]",
    help="Measure this machine's device, print a file for --device-file, and exit. Needs no MODEL.",
)
@_flag("--run", help="For a script: let it train on inside the limit when its first step is planned.")
@_flag("-q", "--quiet", help="Show no progress.")
@_flag("--traceback", help="Show tracebacks of unexpected errors.")
@click.version_option(package_name="rotor-plan")
def main(traceback: bool, **options: Any) -> None:
    """Plan a training step of MODEL that stays inside a memory limit, at the least extra time.

    MODEL is file.py, file.py:name or package.module:name. The file defines `model` (a module, or a function that
    returns one) and `sample` (a tensor, tuple or dict, or a function of the batch size that returns one); `loss` (a
    function of the output) and `optimizer` (a function of the parameters) are optional. A model class of transformers
    needs no file: --config configures it, and its weights are random.

    Any other file is a training script. The command runs it, with ARGUMENTS, until its first training step would change
    a weight, and plans this step; with --run, the script trains on inside the limit.
    """
    # Silence the CPU profiler, which measures memory and logs to stderr. torch reads this variable on import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    request = Request(**options)
    try:
        refuse_wrong_use(request)
        if request.pipeline is not None:
            from rotor_cli.pipeline_command import run

            run(request)
            return
        from rotor_cli.plan_command import plan, plan_script
        from rotor_cli.write_outputs import write_outputs

        if request.as_script:
            facts = plan_script(request, lambda facts: write_outputs(facts, request))
        else:
            facts = plan(request)
            write_outputs(facts, request)
    except Failure:
        raise
    except KeyboardInterrupt:
        click.echo("rotor-plan: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if traceback:
            raise
        message = f"unexpected error: {type(error).__name__}: {error} (--traceback shows where)"
        raise Failure(message, UNEXPECTED, kind="unexpected", name=type(error).__name__) from error
    if (problem := facts.problem()) is not None:
        raise Failure(problem, DIFFERENT, kind="verify_differs")
