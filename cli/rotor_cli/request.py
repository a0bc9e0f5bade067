"""What the command is asked for, checked as far as that is possible before anything is loaded."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rotor_cli.errors import usage
from rotor_cli.loading.script_file import defines
from rotor_cli.loading.target import split_target

_IMAGES = (".svg", ".png")
_SOME_DEVICE = 10**12
"""Bytes. Whether a text is a share of a device can be said before the device is known."""
_DEVICE = re.compile(r"cpu(:0)?|cuda(:\d+)?")


def batch_of(text: str | None) -> int | Literal["max", "best"] | None:
    """What `--batch` says; Failure for anything but a number, `max` and `best`."""
    try:
        match text:
            case None | "max" | "best":
                return text
            case _:
                return int(text)
    except ValueError:
        raise usage(f"--batch {text!r} is no number of samples, and neither 'max' nor 'best'") from None


@dataclass(frozen=True, slots=True)
class Request:
    """The options, by their names on the command line."""

    model: str
    mem_limit: str | None
    max_overhead: str | None
    device: str | None
    batch: int | Literal["max", "best"] | None
    shape: str | None
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
        """Whether the command line says that the file is a training script."""
        return self.script_arguments is not None or self.run

    @property
    def as_script(self) -> bool:
        """Whether the file is a training script: it is said so, or it does not define what a model file does."""
        if self.explicit_script:
            return True
        if not self.model.endswith(".py") or self._of_model_files():
            return False
        return not defines(self.model, ("model", "sample"))

    def _of_model_files(self) -> list[str]:
        """The options that are given and that only a model file leaves open; a script says these things itself."""
        given = {
            "--device": self.device,
            "--device-memory": self.device_memory,
            "--device-file": self.device_file,
            "--dtype": self.dtype,
            "--precision": self.precision,
            "--autocast": self.autocast,
            "--optimizer": self.optimizer,
            "--batch": self.batch,
            "--input": self.shape,
            "--config": self.config,
            "--pipeline": self.pipeline,
            "--step-in-backward": self.step_in_backward or None,
            "--keep": self.keep,
        }
        return [name for name, value in given.items() if value is not None]

    @property
    def overhead(self) -> float | None:
        """The share of more time that is allowed: 0.1 for `10%`; Failure if that is no share."""
        return None if self.max_overhead is None else _share(self.max_overhead)

    @property
    def batch_aim(self) -> Literal["max", "best"] | None:
        """How the batch is to be chosen; None where it is not."""
        return self.batch if self.batch in ("max", "best") else None

    @property
    def batch_size(self) -> int | None:
        """The number of samples that is asked for; None where the model file or the choice says it."""
        return self.batch if isinstance(self.batch, int) else None

    @property
    def elsewhere(self) -> bool:
        """Whether the step is planned for a device that need not be there."""
        named = self.device is not None and not _DEVICE.fullmatch(self.device)
        return named or self.device_memory is not None or self.device_file is not None

    @property
    def limited(self) -> bool:
        """Whether a plan for one limit is wanted: a sweep alone has none."""
        if self.batch_aim is not None:
            return True
        others = (self.verify, self.compare, self.plan_file, self.trace_file, self.html_file, self.run)
        alone = self.sweep and not any(others)
        return not alone or self.mem_limit is not None or self.max_overhead is not None

    def refuse_wrong_use(self) -> None:
        """Failure for options that exclude each other, for texts that say nothing, and for files that are not there or
        cannot be written. Nothing is loaded for it.
        """
        split_target(self.model)
        self._refuse_script()
        self._refuse_texts()
        _refuse_unwritable(self.json_file, stdout=True)
        for path in (self.plan_file, self.plot_file, self.trace_file, self.html_file):
            _refuse_unwritable(path)
        if self.overhead is not None and self.mem_limit is not None:  # in this order: a share that is none is refused
            raise usage("--mem-limit and --max-overhead both say how to plan; give one of them")
        if self.plot_file is not None:
            self._refuse_plot(self.plot_file)
        self._refuse_pipeline()
        self._refuse_batch()
        self._refuse_step_in_backward()
        self._refuse_offload()
        if self.backward_order != "any" and self.forwards_in_flight == 1:
            raise usage("--backward-order is about several forwards in flight; add --forwards-in-flight 2")

    def _refuse_script(self) -> None:
        if not self.explicit_script:
            return
        if not self.model.endswith(".py"):
            raise usage(
                f"{self.model} is no script, and -- is followed by the arguments of one: train.py -- --epochs 3"
            )
        for name in self._of_model_files():
            raise usage(f"{name} is for a model file; a script decides that itself: give it what it takes after --")
        if self.run and self.verify:
            raise usage("--verify takes steps of its own, and --run lets the script train; leave one of them out")
        if self.run and self.json_file == "-":
            raise usage("with --run, stdout is the script's; give --json the name of a file")

    def _refuse_texts(self) -> None:
        if self.mem_limit is not None:
            from rotor_py.units import parse_bytes  # `--help` needs nothing of it

            try:
                for limit in self.mem_limit.split(",") if self.pipeline else [self.mem_limit]:  # one for each rank
                    parse_bytes(limit, device_bytes=_SOME_DEVICE)
            except ValueError as error:
                raise usage(f"--mem-limit: {error}") from error
        if self.device_memory is not None:
            from rotor_py.units import parse_bytes

            try:
                parse_bytes(self.device_memory)
            except ValueError as error:
                raise usage(f"--device-memory: {error}") from error
        if self.elsewhere:
            self._refuse_elsewhere(self.device or "")
        if self.precision is not None and ":" not in (self.device or ""):
            raise usage("--precision is for parameters that several devices share; write --device h100:8, or --dtype")
        if self.autocast is not None and not self.elsewhere:
            raise usage(
                "--autocast is for a device that need not be here: add --device h100. Here, have the model's "
                "forward enter torch.autocast, or plan the training script itself: rotor-plan train.py --"
            )

    def _refuse_elsewhere(self, device: str) -> None:
        if device and self.device_file is None and not _DEVICE.fullmatch(device):
            from rotor_py.devices.names import name_and_count

            try:
                name_and_count(device)
            except ValueError as error:
                raise usage(f"--device: {error}") from error
        if _DEVICE.fullmatch(device):
            raise usage(
                f"--device {device} is a device of this machine; --device-memory and --device-file are about one that "
                "need not be here"
            )
        refused = {
            "--verify": (self.verify, "trains a step on the device"),
            "--compile": (self.compile, "compiles the stages for the device, and measures them there"),
            "--offload": (self.offload is not None, "measures how fast activations move there"),
            "--pipeline": (self.pipeline is not None, "measures a microbatch on the device"),
        }
        for option, (given, does) in refused.items():
            if given:
                raise usage(f"{option} {does}, which is not here; leave out --device {device}".rstrip())

    def _refuse_batch(self) -> None:
        aim, effective, multiple = self.batch_aim, self.grad_accumulation, self.batch_multiple
        if aim is None:
            for name, given in (("--batch-multiple", multiple != 1), ("--grad-accumulation", effective is not None)):
                if given:
                    raise usage(f"{name} is about a batch that is chosen; add --batch max or --batch best")
            return
        if self.max_overhead is not None:
            raise usage(f"--batch {aim} looks for a batch inside a limit; give --mem-limit instead of --max-overhead")
        if self.compile:
            raise usage(
                f"--batch {aim} looks at plain stages; leave out --compile, and plan with it for the batch that it "
                "finds"
            )
        if self.keep is not None:
            raise usage(
                f"--batch {aim} looks at exact plans; leave out --keep, and plan with it for the batch it finds"
            )
        if effective is None:
            return
        if self.fresh_grads:
            raise usage(
                "--fresh-grads frees gradients between batches, and --grad-accumulation adds them up over several; "
                "leave one of them out"
            )
        if effective % multiple:
            raise usage(
                f"no multiple of {multiple} divides {effective}, so batches of one size cannot make it; give "
                f"--grad-accumulation a multiple of {multiple}"
            )

    def _refuse_step_in_backward(self) -> None:
        if not self.step_in_backward:
            return
        if self.forwards_in_flight > 1:
            raise usage(
                "--step-in-backward steps parameters in the first backward, and others are still in flight then; leave "
                "out --forwards-in-flight"
            )
        if self.batch_aim is not None:
            raise usage(
                f"--batch {self.batch_aim} looks at plain steps; leave out --step-in-backward, and plan with it "
                "for the batch that it finds"
            )

    def _refuse_offload(self) -> None:
        if self.offload is None:
            return
        others = {
            "--forwards-in-flight": (self.forwards_in_flight > 1, "has several forwards share the way there"),
            "--compile": (self.compile, "has Inductor decide what a stage saves"),
            "--max-overhead": (self.max_overhead is not None, "chooses among plans that move nothing"),
            f"--batch {self.batch}": (self.batch_aim is not None, "looks at steps that move nothing"),
        }
        for option, (given, does) in others.items():
            if given:
                raise usage(f"--offload has a plan move what stages save, and {option} {does}; leave one of them out")

    def _refuse_pipeline(self) -> None:
        of_pipelines = {"--microbatches": self.microbatches, "--virtual-stages": self.virtual_stages}
        if self.pipeline is None:
            given = [name for name, value in of_pipelines.items() if value is not None]
            if given or self.schedule != "1f1b":
                raise usage(f"{(*given, '--schedule')[0]} is about a pipeline; add --pipeline RANKS")
            return
        alone = {
            "--max-overhead": self.max_overhead,
            "--fresh-grads": self.fresh_grads,
            "--step-in-backward": self.step_in_backward,
            "--keep": self.keep,
            "--offload": self.offload,
            "--backward-order": self.backward_order != "any",
            "--verify": self.verify,
            "--compare": self.compare,
            "--sweep": self.sweep,
            "--save": self.plan_file,
            "--trace": self.trace_file,
            "--html": self.html_file,
            "--compile": self.compile,
            f"--batch {self.batch}": self.batch_aim,
        }
        for name, value in alone.items():
            if value:
                raise usage(f"--pipeline plans for several processes, and {name} is about one; leave one of them out")
        from rotor_solver import Schedule

        try:
            Schedule(self.schedule, self.pipeline, self.microbatches_or_default, self.virtual_stages_or_default)
        except ValueError as error:
            raise usage(f"--pipeline: {error}") from error

    @property
    def microbatches_or_default(self) -> int:
        """Of a pipeline: twice as many as ranks unless given."""
        return 2 * (self.pipeline or 1) if self.microbatches is None else self.microbatches

    @property
    def virtual_stages_or_default(self) -> int:
        """Of a pipeline: parts on each rank."""
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)

    def _refuse_plot(self, path: str) -> None:
        from rotor_solver.plot import require_matplotlib

        if not self.sweep:
            raise usage("--plot draws what --sweep finds; add --sweep")
        if Path(path).suffix.lower() not in _IMAGES:
            raise usage(f"--plot {path!r} is no image that can be drawn; write a file ending in {' or '.join(_IMAGES)}")
        try:
            require_matplotlib()
        except ImportError as error:
            raise usage(f"--plot: {error}") from error


def _share(text: str) -> float:
    number, sign, rest = text.strip().partition("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = math.nan
    if not sign or rest or not 0 <= share < math.inf:
        raise usage(f"--max-overhead {text!r} is not a share of the time; write for example 10%")
    return share


# Before the model is loaded: a typing error in a file's name must not cost a run of minutes.
def _refuse_unwritable(path: str | None, *, stdout: bool = False) -> None:
    if path is None or (stdout and path == "-"):
        return
    if path == "-":
        raise usage("- stands for stdout, which only --json writes to; give the name of a file")
    folder = Path(str(path)).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(str(path)).is_dir():
        raise usage(f"{path} cannot be written: {folder} is not a folder in which files can be made")
