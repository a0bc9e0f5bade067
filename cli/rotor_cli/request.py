"""The parsed options of `rotor-plan`, and rules by which it refuses invalid or conflicting ones."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rotor_cli.failure import about_option, usage
from rotor_cli.model_file_errors import defines, refuse_file_without, refuse_missing_module, split_target

HERE = re.compile(r"cpu(:0)?|cuda(:\d+)?")  # names of devices of this machine


def batch_of(text: str | None) -> int | Literal["max", "best"] | None:
    """Parse --batch: a number above 0, "max" or "best". Raises Failure for other texts."""
    match text:
        case None | "max" | "best":
            return text
    if not text.isdecimal() or not int(text):
        raise usage("bad_value", "--batch", f"--batch must be a number above 0, 'max' or 'best', got {text!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class Request:
    model: str
    mem_limit: str | None
    max_overhead: str | None
    device: str | None
    batch: int | Literal["max", "best"] | None
    input: str | None
    config: str | None
    slots: int
    fresh_grads: bool
    no_cache: bool
    forwards_in_flight: int
    backward_order: Literal["any", "reverse"]
    verify: bool
    compare: bool
    sweep: bool
    plot_file: str | None
    json_file: str | None
    plan_file: str | None
    trace_file: str | None
    html_file: str | None
    pipeline: int | None = None
    microbatches: int | None = None
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    compile: bool = False
    quiet: bool = False
    batch_multiple: int = 1
    device_memory: str | None = None
    device_file: str | None = None
    dtype: str | None = None
    precision: str | None = None
    shard: Literal["blocks", "whole"] | None = None
    autocast: str | None = None
    optimizer: str | None = None
    grad_accumulation: int | None = None
    step_in_backward: bool = False
    keep: Literal["bf16", "fp8", "int8"] | None = None
    offload: str | None = None
    script_arguments: tuple[str, ...] | None = None
    run: bool = False

    @property
    def explicit_script(self) -> bool:
        return self.script_arguments is not None or self.run

    @property
    def as_script(self) -> bool:
        """Whether MODEL is a script: by `--` or --run, or it lacks `model` or `sample` and no option needs these."""
        return self.explicit_script or (
            self.model.endswith(".py") and not self.of_model_files and not defines(self.model, ("model", "sample"))
        )

    @property
    def of_model_files(self) -> list[str]:
        """The given options that only model files allow: a script itself decides device, batch, optimizer and so on."""
        names = "device device_memory device_file dtype precision shard autocast optimizer batch input config pipeline"
        given = [name for name in (*names.split(), "step_in_backward") if getattr(self, name) not in (None, False)]
        return ["--" + name.replace("_", "-") for name in given]

    @property
    def overhead(self) -> float | None:
        """The value of --max-overhead as a share: 0.1 for `10%`; None if not given. Raises Failure for other texts."""
        if self.max_overhead is None:
            return None
        number, sign, rest = self.max_overhead.strip().partition("%")
        try:
            share = float(number) / 100
        except ValueError:
            share = math.nan
        if not sign or rest or not 0 <= share < math.inf:
            message = f"--max-overhead must be a share of 0% or more, such as 10%, got {self.max_overhead!r}"
            raise usage("bad_value", "--max-overhead", message)
        return share

    @property
    def batch_aim(self) -> Literal["max", "best"] | None:
        return self.batch if self.batch in ("max", "best") else None

    @property
    def simulated(self) -> bool:
        named = self.device is not None and not HERE.fullmatch(self.device)
        return named or self.device_memory is not None or self.device_file is not None

    @property
    def limited(self) -> bool:
        """Whether to make a plan for one limit: yes, unless --sweep is given without an option that needs one."""
        others = (self.verify, self.compare, self.plan_file, self.trace_file, self.html_file, self.run)
        given = (self.batch_aim, self.mem_limit, self.max_overhead)
        return not self.sweep or any(others) or any(each is not None for each in given)

    @property
    def microbatches_or_default(self) -> int:
        return 2 * (self.pipeline or 1) if self.microbatches is None else self.microbatches


# The command checks these rules before it loads the model, which may take minutes. A rule imports torch or numba, which
# take seconds, only if its option is given.


_SOME_DEVICE = 10**12  # assumed bytes of the device, to check only the text of a limit such as 80%
_IMAGES = (".svg", ".png")
_EXCLUDED, _NEEDS = "excluded_together", "needs_option"

# Each rule yields a value that is true if the request breaks it, and the failure's kind, option and message.
_Rules = Iterator[tuple[object, str, str, str]]


def refuse_wrong_use(request: Request) -> None:
    """Raise Failure for conflicting options, invalid texts, and files that are missing or cannot be written."""
    location, name = split_target(request.model)
    for rules in (_script, _device, _values, _files, _pipeline, _batch, _step):
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
    message = f"{request.model} must be a script before --, as in train.py -- --epochs 3"
    yield not request.model.endswith(".py"), "not_a_script", request.model, message
    for option in request.of_model_files:
        message = f"{option} needs a model file; for a script, use the script's own options after --"
        yield True, "not_for_a_script", option, message
    message = "leave out --verify or --run: --verify takes steps of its own, and --run lets the script train"
    yield request.run and request.verify, _EXCLUDED, "--verify", message
    message = "with --run, stdout is the script's; give --json the name of a file"
    yield request.run and request.json_file == "-", _EXCLUDED, "--json", message


def _device(request: Request) -> _Rules:
    from rotor_py.units import parse_bytes

    if request.mem_limit is not None:
        with about_option("--mem-limit"):
            for limit in request.mem_limit.split(",") if request.pipeline else [request.mem_limit]:  # one for each rank
                parse_bytes(limit, device_bytes=_SOME_DEVICE)
    if request.device_memory is not None:
        with about_option("--device-memory"):
            parse_bytes(request.device_memory)
    several, moves = False, request.offload is not None
    if request.simulated:
        from rotor_py.estimation.device_table import find_devices, split_count

        device = request.device or ""
        other = "--device-memory" if request.device_file is None else "--device-file"
        simulator = f"--device {device}" if device else other
        message = f"leave out --device {device}, which is not simulated, or --device-memory and --device-file"
        yield HERE.fullmatch(device), _EXCLUDED, "--device", message
        with about_option("--device" if request.device_file is None else "--device-file"):
            if device or request.device_file is not None:
                find_devices(device, request.device_file)
            several = split_count(device)[1] > 1
        refused = {
            "--verify": (request.verify, "trains a step on the device"),
            "--compile": (request.compile, "compiles and measures the stages on the device"),
            "--offload": (moves and request.offload != "host", "to a file measures copies from the device"),
            f"--batch {request.batch}": (moves and request.batch_aim, "with --offload trains steps on the device"),
            "--pipeline": (request.pipeline, "measures a microbatch on the device"),
        }
        for option, (given, does) in refused.items():
            yield given, _EXCLUDED, option, f"{option} {does}, which is simulated; leave out {simulator}"
    message = "--precision needs several simulated devices, as in --device h100:8; for one device, write --dtype"
    yield request.precision is not None and not several, _NEEDS, "--precision", message
    message = "--shard needs several simulated devices to shard parameters over; write --device h100:8"
    yield request.shard is not None and not several, _NEEDS, "--shard", message
    message = "--autocast needs a simulated --device; on a real one, the forward or a script can enter torch.autocast"
    yield request.autocast is not None and not request.simulated, _NEEDS, "--autocast", message


def _values(request: Request) -> _Rules:
    if request.offload is not None:
        from rotor_py.offload import refuse_other_names

        with about_option("--offload"):
            refuse_other_names(request.offload)
    message = "give --mem-limit or --max-overhead, not both: each of them chooses the limit"
    yield request.overhead is not None and request.mem_limit is not None, _EXCLUDED, "--max-overhead", message


def _files(request: Request) -> _Rules:
    json_file = None if request.json_file == "-" else request.json_file
    for path in (json_file, request.plan_file, request.plot_file, request.trace_file, request.html_file):
        if path is not None:
            message = "- stands for stdout, which only --json writes to; give the name of a file"
            yield path == "-", "stdout_is_for_json", "-", message
            folder = Path(path).resolve().parent
            message = f"{path} cannot be written; give the name of a file, in a folder in which you may make files"
            writable = folder.is_dir() and os.access(folder, os.W_OK) and not Path(path).is_dir()
            yield not writable, "not_writable", path, message
    if request.plot_file is not None:
        from rotor_solver.frontier import require_matplotlib

        yield not request.sweep, _NEEDS, "--plot", "--plot draws the curve of --sweep; add --sweep"
        message = f"--plot must be a file ending in .svg or .png, got {request.plot_file!r}"
        yield Path(request.plot_file).suffix.lower() not in _IMAGES, "not_an_image", "--plot", message
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
            yield given, _NEEDS, option, f"{option} needs a pipeline; add --pipeline RANKS"
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
        yield value, _EXCLUDED, option, f"--pipeline is for several processes, {option} for one; leave one of them out"
    from rotor_solver import Schedule

    virtual = request.virtual_stages or (2 if request.schedule == "interleaved" else 1)
    with about_option("--pipeline"):
        Schedule(request.schedule, request.pipeline, request.microbatches_or_default, virtual)


def _batch(request: Request) -> _Rules:
    aim, effective, multiple = request.batch_aim, request.grad_accumulation, request.batch_multiple
    if aim is None:
        for option, given in (("--batch-multiple", multiple != 1), ("--grad-accumulation", effective is not None)):
            yield given, _NEEDS, option, f"{option} is for choosing a batch; add --batch max or --batch best"
        return
    message = f"--batch {aim} needs a limit to choose a batch for; give --mem-limit instead of --max-overhead"
    yield request.max_overhead is not None, _EXCLUDED, "--max-overhead", message
    for option, given in (("--compile", request.compile), ("--step-in-backward", request.step_in_backward)):
        message = f"--batch {aim} cannot be combined with {option}; choose a batch first, then plan it with {option}"
        yield given, _EXCLUDED, option, message
    if effective is not None:
        message = "--grad-accumulation adds gradients up over several batches, and --fresh-grads frees them in between"
        yield request.fresh_grads, _EXCLUDED, "--fresh-grads", f"{message}; leave one of them out"
        message = f"no multiple of {multiple} divides {effective}; give --grad-accumulation a multiple of {multiple}"
        yield effective % multiple, "not_divisible", "--grad-accumulation", message


def _step(request: Request) -> _Rules:
    several, moves = request.forwards_in_flight > 1, request.offload is not None
    message = "--step-in-backward steps parameters that other forwards' backwards need; leave out --forwards-in-flight"
    yield request.step_in_backward and several, _EXCLUDED, "--step-in-backward", message
    message = "--backward-order needs several forwards in flight; add --forwards-in-flight 2"
    yield request.backward_order != "any" and not several, _NEEDS, "--backward-order", message
    message = "--offload offloads activations of one forward only; leave out --forwards-in-flight"
    yield moves and several, _EXCLUDED, "--forwards-in-flight", message
    message = "--offload cannot offload what stages compiled by Inductor save; leave out --compile or --offload"
    yield moves and request.compile, _EXCLUDED, "--compile", message
