"""The parsed options of the command."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from rotor_cli.failure import usage
from rotor_cli.model_file_errors import defines

HERE = re.compile(r"cpu(:0)?|cuda(:\d+)?")
"""Devices of this machine."""


def batch_of(text: str | None) -> int | Literal["max", "best"] | None:
    """Parse `--batch`. Raises Failure for anything but a number above 0, `max` and `best`."""
    match text:
        case None | "max" | "best":
            return text
    if not text.isdecimal() or not int(text):
        message = f"--batch {text!r} is no number of samples above 0, and neither 'max' nor 'best'"
        raise usage("bad_value", "--batch", message)
    return int(text)


@dataclass(frozen=True, slots=True)
class Request:
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
        """Whether the file is a training script: marked as one, or without the definitions of a model file."""
        if self.explicit_script:
            return True
        if not self.model.endswith(".py") or self.of_model_files:
            return False
        return not defines(self.model, ("model", "sample"))

    @property
    def of_model_files(self) -> list[str]:
        """Given options that apply to model files only; a script decides them itself."""
        given = {
            "--device": self.device,
            "--device-memory": self.device_memory,
            "--device-file": self.device_file,
            "--dtype": self.dtype,
            "--precision": self.precision,
            "--shard": self.shard,
            "--autocast": self.autocast,
            "--optimizer": self.optimizer,
            "--batch": self.batch,
            "--input": self.shape,
            "--config": self.config,
            "--pipeline": self.pipeline,
            "--step-in-backward": self.step_in_backward or None,
        }
        return [name for name, value in given.items() if value is not None]

    @property
    def overhead(self) -> float | None:
        """Allowed overhead: 0.1 for `10%`. Raises Failure if it is no share."""
        if self.max_overhead is None:
            return None
        number, sign, rest = self.max_overhead.strip().partition("%")
        try:
            share = float(number) / 100
        except ValueError:
            share = math.nan
        if not sign or rest or not 0 <= share < math.inf:
            message = f"--max-overhead {self.max_overhead!r} is not a share of the time; write for example 10%"
            raise usage("bad_value", "--max-overhead", message)
        return share

    @property
    def batch_aim(self) -> Literal["max", "best"] | None:
        """Aim of the batch choice; None without a choice."""
        return self.batch if self.batch in ("max", "best") else None

    @property
    def batch_size(self) -> int | None:
        return self.batch if isinstance(self.batch, int) else None

    @property
    def simulated(self) -> bool:
        """Whether the device is simulated."""
        named = self.device is not None and not HERE.fullmatch(self.device)
        return named or self.device_memory is not None or self.device_file is not None

    @property
    def limited(self) -> bool:
        """Whether to plan for one limit; a sweep alone has none."""
        if self.batch_aim is not None:
            return True
        others = (self.verify, self.compare, self.plan_file, self.trace_file, self.html_file, self.run)
        return not self.sweep or any(others) or self.mem_limit is not None or self.max_overhead is not None

    @property
    def microbatches_or_default(self) -> int:
        return 2 * (self.pipeline or 1) if self.microbatches is None else self.microbatches

    @property
    def virtual_stages_or_default(self) -> int:
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)
