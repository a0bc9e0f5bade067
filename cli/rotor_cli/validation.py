"""Refuse impossible requests before the model is loaded, so that a typo does not cost minutes.

rotor_py is imported per option, since `--help` does not need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rotor_cli.failure import about_option, usage
from rotor_cli.model_file_errors import refuse_file_without, refuse_missing_module, split_target
from rotor_cli.request import HERE, Request

_SOME_DEVICE = 10**12
"""Bytes of a stand-in device: validates a share before the device is known."""
_IMAGES = (".svg", ".png")

_Rules = Iterator[tuple[object, str, str, str]]
"""Whether a request breaks a rule; then the kind, the option and the sentence of the failure."""


def refuse_wrong_use(request: Request) -> None:
    """Raise Failure for conflicting options, invalid texts, and missing or unwritable files. Loads nothing."""
    location, name = split_target(request.model)
    for rules in (_script, _device, _values, _files, _pipeline, _batch, _step, _offload):
        for broken, kind, option, message in rules(request):
            if broken:
                raise usage(kind, option, message)
    if not location.endswith(".py"):
        refuse_missing_module(location)
    elif not request.as_script:
        refuse_file_without(name, location)


def _script(request: Request) -> _Rules:
    if not request.explicit_script:
        return
    yield (
        not request.model.endswith(".py"), "not_a_script", request.model,
        f"{request.model} is no script, and -- is followed by the arguments of one: train.py -- --epochs 3",
    )  # fmt: skip
    for option in request.of_model_files:
        yield (
            True, "not_for_a_script", option,
            f"{option} is for a model file; a script decides that itself: give it what it takes after --",
        )  # fmt: skip
    yield (
        request.run and request.verify, "excluded_together", "--verify",
        "--verify takes steps of its own, and --run lets the script train; leave one of them out",
    )  # fmt: skip
    yield (
        request.run and request.json_file == "-", "excluded_together", "--json",
        "with --run, stdout is the script's; give --json the name of a file",
    )  # fmt: skip


def _device(request: Request) -> _Rules:
    from rotor_py.units import parse_bytes

    if request.mem_limit is not None:
        with about_option("--mem-limit"):
            for limit in request.mem_limit.split(",") if request.pipeline else [request.mem_limit]:  # one per rank
                parse_bytes(limit, device_bytes=_SOME_DEVICE)
    if request.device_memory is not None:
        with about_option("--device-memory"):
            parse_bytes(request.device_memory)
    several = False
    if request.simulated:
        from rotor_py.estimation.device_table import find_devices, split_count

        device = request.device or ""
        yield (
            HERE.fullmatch(device), "excluded_together", "--device",
            f"--device {device} is a device of this machine; --device-memory and --device-file are about one that "
            "need not be here",
        )  # fmt: skip
        with about_option("--device"):
            if device and request.device_file is None:
                find_devices(device)
            several = split_count(device)[1] > 1
        moves = request.offload is not None
        refused = {
            "--verify": (request.verify, "trains a step on the device"),
            "--compile": (request.compile, "compiles the stages for the device, and measures them there"),
            "--offload": (moves and request.offload != "host", "measures how fast a file is beside the device"),
            f"--batch {request.batch_aim}": (
                moves and request.batch_aim is not None,
                "with --offload trains steps on the device",
            ),
            "--pipeline": (request.pipeline is not None, "measures a microbatch on the device"),
        }
        for option, (given, does) in refused.items():
            message = f"{option} {does}, which is not here; leave out --device {device}".rstrip()
            yield given, "excluded_together", option, message
    yield (
        request.precision is not None and not several, "needs_option", "--precision",
        "--precision is for parameters that several devices share; write --device h100:8, or --dtype",
    )  # fmt: skip
    yield (
        request.shard is not None and not several, "needs_option", "--shard",
        "--shard divides parameters among several devices; write --device h100:8",
    )  # fmt: skip
    yield (
        request.autocast is not None and not request.simulated, "needs_option", "--autocast",
        "--autocast is for a device that need not be here: add --device h100. Here, have the model's forward enter "
        "torch.autocast, or plan the training script itself: rotor-plan train.py --",
    )  # fmt: skip


def _values(request: Request) -> _Rules:
    if request.offload is not None:
        from rotor_py.offload import refuse_other_names

        with about_option("--offload"):
            refuse_other_names(request.offload)
    if request.device_file is not None:
        from rotor_py.estimation.device_table import tables_in

        with about_option("--device-file"):
            tables_in(Path(request.device_file))
    yield (
        request.overhead is not None and request.mem_limit is not None, "excluded_together", "--max-overhead",
        "--mem-limit and --max-overhead both say how to plan; give one of them",
    )  # fmt: skip


def _files(request: Request) -> _Rules:
    written = (request.json_file, request.plan_file, request.plot_file, request.trace_file, request.html_file)
    for number, path in enumerate(written):
        if path is None or (number == 0 and path == "-"):
            continue
        folder = Path(path).resolve().parent
        yield (
            path == "-", "stdout_is_for_json", "-",
            "- stands for stdout, which only --json writes to; give the name of a file",
        )  # fmt: skip
        yield (
            not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir(), "not_writable", path,
            f"{path} cannot be written: {folder} is not a folder in which files can be made",
        )  # fmt: skip
    if request.plot_file is not None:
        from rotor_solver.frontier import require_matplotlib

        yield not request.sweep, "needs_option", "--plot", "--plot draws what --sweep finds; add --sweep"
        yield (
            Path(request.plot_file).suffix.lower() not in _IMAGES, "not_an_image", "--plot",
            f"--plot {request.plot_file!r} is no image that can be drawn; write a file ending in "
            f"{' or '.join(_IMAGES)}",
        )  # fmt: skip
        try:
            require_matplotlib()
        except ImportError as error:
            raise usage("not_installed", "--plot", f"--plot: {error}") from error


def _pipeline(request: Request) -> _Rules:
    if request.pipeline is None:
        of_pipelines = {
            "--microbatches": request.microbatches is not None,
            "--virtual-stages": request.virtual_stages is not None,
            "--schedule": request.schedule != "1f1b",
        }
        for option, given in of_pipelines.items():
            yield given, "needs_option", option, f"{option} is about a pipeline; add --pipeline RANKS"
        return
    of_one_process = {
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
    for option, value in of_one_process.items():
        message = f"--pipeline plans for several processes, and {option} is about one; leave one of them out"
        yield value, "excluded_together", option, message
    from rotor_solver import Schedule

    with about_option("--pipeline"):
        Schedule(request.schedule, request.pipeline, request.microbatches_or_default, request.virtual_stages_or_default)


def _batch(request: Request) -> _Rules:
    aim, effective, multiple = request.batch_aim, request.grad_accumulation, request.batch_multiple
    if aim is None:
        for option, given in (("--batch-multiple", multiple != 1), ("--grad-accumulation", effective is not None)):
            message = f"{option} is about a batch that is chosen; add --batch max or --batch best"
            yield given, "needs_option", option, message
        return
    yield (
        request.max_overhead is not None, "excluded_together", "--max-overhead",
        f"--batch {aim} looks for a batch inside a limit; give --mem-limit instead of --max-overhead",
    )  # fmt: skip
    yield (
        request.compile, "excluded_together", "--compile",
        f"--batch {aim} looks at plain stages; leave out --compile, and plan with it for the batch that it finds",
    )  # fmt: skip
    yield (
        effective is not None and request.fresh_grads, "excluded_together", "--fresh-grads",
        "--fresh-grads frees gradients between batches, and --grad-accumulation adds them up over several; "
        "leave one of them out",
    )  # fmt: skip
    yield (
        effective is not None and effective % multiple, "not_divisible", "--grad-accumulation",
        f"no multiple of {multiple} divides {effective}, so batches of one size cannot make it; give "
        f"--grad-accumulation a multiple of {multiple}",
    )  # fmt: skip


def _step(request: Request) -> _Rules:
    several = request.forwards_in_flight > 1
    yield (
        request.step_in_backward and several, "excluded_together", "--step-in-backward",
        "--step-in-backward steps parameters in the first backward, and others are still in flight then; leave "
        "out --forwards-in-flight",
    )  # fmt: skip
    yield (
        request.step_in_backward and request.batch_aim, "excluded_together", "--step-in-backward",
        f"--batch {request.batch_aim} looks at plain steps; leave out --step-in-backward, and plan with it "
        "for the batch that it finds",
    )  # fmt: skip
    yield (
        request.backward_order != "any" and not several, "needs_option", "--backward-order",
        "--backward-order is about several forwards in flight; add --forwards-in-flight 2",
    )  # fmt: skip


def _offload(request: Request) -> _Rules:
    others = {
        "--forwards-in-flight": (request.forwards_in_flight > 1, "has several forwards share the way there"),
        "--compile": (request.compile, "has Inductor decide what a stage saves"),
    }
    for option, (given, does) in others.items():
        message = f"--offload has a plan move what stages save, and {option} {does}; leave one of them out"
        yield request.offload is not None and given, "excluded_together", option, message
