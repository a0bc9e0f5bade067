"""Refuse impossible requests before the model is loaded, so that a typo does not cost minutes.

rotor_py is imported per option, since `--help` does not need it.
"""

from __future__ import annotations

import os
from pathlib import Path

from rotor_cli.errors import about_option, kind_of, usage
from rotor_cli.model_file_errors import refuse_file_without, refuse_missing_module, split_target
from rotor_cli.option_values import (
    arguments_of,
    autocast_dtype,
    configuration,
    floating_dtype,
    optimizer_and_options,
    optimizers,
    shape_of,
)
from rotor_cli.request import HERE, Request

_SOME_DEVICE = 10**12
"""Bytes of a stand-in device: validates a share before the device is known."""
_IMAGES = (".svg", ".png")


def refuse_wrong_use(request: Request) -> None:
    """Raise Failure for conflicting options, invalid texts, and missing or unwritable files. Loads nothing."""
    location, name = split_target(request.model)
    _refuse_script(request)
    _refuse_sizes(request)
    _refuse_device(request)
    _refuse_values(request)
    _refuse_unwritable_files(request)
    if (
        request.overhead is not None and request.mem_limit is not None
    ):  # in this order: an invalid share is refused first
        raise usage(
            "--mem-limit and --max-overhead both say how to plan; give one of them",
            kind="excluded_together",
            name="--max-overhead",
        )
    _refuse_plot(request)
    _refuse_pipeline(request)
    _refuse_batch(request)
    _refuse_step_in_backward(request)
    _refuse_offload(request)
    if request.backward_order != "any" and request.forwards_in_flight == 1:
        raise usage(
            "--backward-order is about several forwards in flight; add --forwards-in-flight 2",
            kind="needs_option",
            name="--backward-order",
        )
    if not location.endswith(".py"):
        refuse_missing_module(location)
    elif not request.as_script:
        refuse_file_without(name, location)


def _refuse_step_in_backward(request: Request) -> None:
    if not request.step_in_backward:
        return
    if request.forwards_in_flight > 1:
        raise usage(
            "--step-in-backward steps parameters in the first backward, and others are still in flight then; leave "
            "out --forwards-in-flight",
            kind="excluded_together",
            name="--step-in-backward",
        )
    if request.batch_aim is not None:
        raise usage(
            f"--batch {request.batch_aim} looks at plain steps; leave out --step-in-backward, and plan with it "
            "for the batch that it finds",
            kind="excluded_together",
            name="--step-in-backward",
        )


def _refuse_offload(request: Request) -> None:
    if request.offload is None:
        return
    others = {
        "--forwards-in-flight": (request.forwards_in_flight > 1, "has several forwards share the way there"),
        "--compile": (request.compile, "has Inductor decide what a stage saves"),
    }
    for option, (given, does) in others.items():
        if given:
            raise usage(
                f"--offload has a plan move what stages save, and {option} {does}; leave one of them out",
                kind="excluded_together",
                name=option,
            )


def _refuse_script(request: Request) -> None:
    """Raise Failure for a file that is no script, and for options that a script decides itself."""
    if not request.explicit_script:
        return
    if not request.model.endswith(".py"):
        raise usage(
            f"{request.model} is no script, and -- is followed by the arguments of one: train.py -- --epochs 3",
            kind="not_a_script",
            name=request.model,
        )
    for name in request.of_model_files:
        raise usage(
            f"{name} is for a model file; a script decides that itself: give it what it takes after --",
            kind="not_for_a_script",
            name=name,
        )
    if request.run and request.verify:
        raise usage(
            "--verify takes steps of its own, and --run lets the script train; leave one of them out",
            kind="excluded_together",
            name="--verify",
        )
    if request.run and request.json_file == "-":
        raise usage(
            "with --run, stdout is the script's; give --json the name of a file",
            kind="excluded_together",
            name="--json",
        )


def _refuse_sizes(request: Request) -> None:
    """Raise Failure for an invalid `--mem-limit` or `--device-memory`."""
    from rotor_py.units import parse_bytes  # `--help` does not need it

    if request.mem_limit is not None:
        with about_option("--mem-limit"):
            for limit in request.mem_limit.split(",") if request.pipeline else [request.mem_limit]:  # one per rank
                parse_bytes(limit, device_bytes=_SOME_DEVICE)
    if request.device_memory is not None:
        with about_option("--device-memory"):
            parse_bytes(request.device_memory)


def _refuse_device(request: Request) -> None:
    """Raise Failure for an unknown device, and for options that need a present one."""
    if request.elsewhere:
        _refuse_elsewhere(request, request.device or "")
    several = request.elsewhere and _count(request.device or "") > 1
    if request.precision is not None and not several:
        raise usage(
            "--precision is for parameters that several devices share; write --device h100:8, or --dtype",
            kind="needs_option",
            name="--precision",
        )
    if request.shard is not None and not several:
        raise usage(
            "--shard divides parameters among several devices; write --device h100:8",
            kind="needs_option",
            name="--shard",
        )
    if request.autocast is not None and not request.elsewhere:
        raise usage(
            "--autocast is for a device that need not be here: add --device h100. Here, have the model's forward enter "
            "torch.autocast, or plan the training script itself: rotor-plan train.py --",
            kind="needs_option",
            name="--autocast",
        )


def _count(device: str) -> int:
    from rotor_py.estimation.device_names import counted

    with about_option("--device"):
        return counted(device)[1]


def _refuse_elsewhere(request: Request, device: str) -> None:
    if device and request.device_file is None and not HERE.fullmatch(device):
        from rotor_py.estimation.device_names import name_and_count

        with about_option("--device"):
            name_and_count(device)
    if HERE.fullmatch(device):
        raise usage(
            f"--device {device} is a device of this machine; --device-memory and --device-file are about one that "
            "need not be here",
            kind="excluded_together",
            name="--device",
        )
    refused = {
        "--verify": (request.verify, "trains a step on the device"),
        "--compile": (request.compile, "compiles the stages for the device, and measures them there"),
        "--offload": (request.offload not in (None, "host"), "measures how fast a file is beside the device"),
        f"--batch {request.batch_aim}": (
            request.offload is not None and request.batch_aim is not None,
            "with --offload trains steps on the device",
        ),
        "--pipeline": (request.pipeline is not None, "measures a microbatch on the device"),
    }
    for option, (given, does) in refused.items():
        if given:
            raise usage(
                f"{option} {does}, which is not here; leave out --device {device}".rstrip(),
                kind="excluded_together",
                name=option,
            )


def _refuse_values(request: Request) -> None:
    """Raise Failure for an invalid batch, shape, dtype, optimizer, configuration, tier or device file."""
    if request.batch_size is not None and request.batch_size < 1:
        raise usage(
            f"--batch is {request.batch_size}; a batch has at least one sample", kind="bad_value", name="--batch"
        )
    if request.shape:
        shape_of(request.shape)
    if request.dtype is not None:
        floating_dtype(request.dtype, "--dtype")
    if request.precision is not None:
        floating_dtype(request.precision, "--precision")
    if request.autocast is not None:
        autocast_dtype(request.autocast)
    if request.optimizer is not None and (known := optimizers()):
        optimizer_and_options(request.optimizer, known, arguments_of)
    configuration(request.config)
    _refuse_tier(request.offload)
    _refuse_device_file(request.device_file)


def _refuse_tier(tier: str | None) -> None:
    if tier is None:
        return
    from rotor_py.offload import refuse_other_names  # `--help` does not need rotor_py

    with about_option("--offload"):
        refuse_other_names(tier)


def _refuse_device_file(file: str | None) -> None:
    if file is None:
        return
    from rotor_py.estimation.device_names import tables_in

    try:
        tables_in(Path(file))
    except (OSError, ValueError) as error:
        raise usage(f"--device-file: {error}", kind=kind_of(error), name="--device-file") from error


def _refuse_unwritable_files(request: Request) -> None:
    _refuse_unwritable(request.json_file, stdout=True)
    for path in (request.plan_file, request.plot_file, request.trace_file, request.html_file):
        _refuse_unwritable(path)


def _refuse_plot(request: Request) -> None:
    """Raise Failure for a plot without a sweep, of no image type, or without Matplotlib."""
    if request.plot_file is None:
        return
    from rotor_solver.frontier import require_matplotlib

    if not request.sweep:
        raise usage("--plot draws what --sweep finds; add --sweep", kind="needs_option", name="--plot")
    if Path(request.plot_file).suffix.lower() not in _IMAGES:
        raise usage(
            f"--plot {request.plot_file!r} is no image that can be drawn; write a file ending in "
            f"{' or '.join(_IMAGES)}",
            kind="not_an_image",
            name="--plot",
        )
    try:
        require_matplotlib()
    except ImportError as error:
        raise usage(f"--plot: {error}", kind="not_installed", name="--plot") from error


def _refuse_unwritable(path: str | None, *, stdout: bool = False) -> None:
    if path is None or (stdout and path == "-"):
        return
    if path == "-":
        raise usage(
            "- stands for stdout, which only --json writes to; give the name of a file",
            kind="stdout_is_for_json",
            name="-",
        )
    folder = Path(str(path)).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(str(path)).is_dir():
        raise usage(
            f"{path} cannot be written: {folder} is not a folder in which files can be made",
            kind="not_writable",
            name=str(path),
        )


def _refuse_pipeline(request: Request) -> None:
    """Raise Failure for single-process options with `--pipeline`, and for pipeline options without it."""
    of_pipelines = {"--microbatches": request.microbatches, "--virtual-stages": request.virtual_stages}
    if request.pipeline is None:
        given = [name for name, value in of_pipelines.items() if value is not None]
        if given or request.schedule != "1f1b":
            raise usage(
                f"{(*given, '--schedule')[0]} is about a pipeline; add --pipeline RANKS",
                kind="needs_option",
                name=(*given, "--schedule")[0],
            )
        return
    alone = {
        "--max-overhead": request.max_overhead,
        "--fresh-grads": request.fresh_grads,
        "--step-in-backward": request.step_in_backward,
        "--keep": request.keep,
        "--offload": request.offload,
        "--backward-order": request.backward_order != "any",
        "--verify": request.verify,
        "--compare": request.compare,
        "--sweep": request.sweep,
        "--save": request.plan_file,
        "--trace": request.trace_file,
        "--html": request.html_file,
        "--compile": request.compile,
        f"--batch {request.batch}": request.batch_aim,
    }
    for name, value in alone.items():
        if value:
            raise usage(
                f"--pipeline plans for several processes, and {name} is about one; leave one of them out",
                kind="excluded_together",
                name=name,
            )
    from rotor_solver import Schedule

    with about_option("--pipeline"):
        Schedule(request.schedule, request.pipeline, request.microbatches_or_default, request.virtual_stages_or_default)


def _refuse_batch(request: Request) -> None:
    """Raise Failure for options that conflict with a chosen batch, or require one."""
    aim, effective, multiple = request.batch_aim, request.grad_accumulation, request.batch_multiple
    if aim is None:
        for name, given in (("--batch-multiple", multiple != 1), ("--grad-accumulation", effective is not None)):
            if given:
                raise usage(
                    f"{name} is about a batch that is chosen; add --batch max or --batch best",
                    kind="needs_option",
                    name=name,
                )
        return
    if request.max_overhead is not None:
        raise usage(
            f"--batch {aim} looks for a batch inside a limit; give --mem-limit instead of --max-overhead",
            kind="excluded_together",
            name="--max-overhead",
        )
    if request.compile:
        raise usage(
            f"--batch {aim} looks at plain stages; leave out --compile, and plan with it for the batch that it finds",
            kind="excluded_together",
            name="--compile",
        )
    if effective is None:
        return
    if request.fresh_grads:
        raise usage(
            "--fresh-grads frees gradients between batches, and --grad-accumulation adds them up over several; "
            "leave one of them out",
            kind="excluded_together",
            name="--fresh-grads",
        )
    if effective % multiple:
        raise usage(
            f"no multiple of {multiple} divides {effective}, so batches of one size cannot make it; give "
            f"--grad-accumulation a multiple of {multiple}",
            kind="not_divisible",
            name="--grad-accumulation",
        )
