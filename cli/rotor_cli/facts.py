"""What the command found out, as data: every report is made from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rotor_py.report import Report

if TYPE_CHECKING:
    from rotor_py.trials.compare import Row
    from rotor_py.trials.operations import Ran

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Verified:
    """What really training a step showed. `plain_*` is None where the plain step did not fit into the device."""

    measured_peak_bytes: int
    measured_step_seconds: float
    max_grad_difference: float | None
    plain_peak_bytes: int | None
    plain_step_seconds: float | None
    noise: float = 0.0
    operations: tuple[Ran, ...] = ()
    """What the step with the plan did one after the other, if that was asked for."""

    def problem(self, mem_limit: int) -> str | None:
        """What is wrong, in words, or None. Two plain steps may differ by `noise`; so may the planned one."""
        if self.measured_peak_bytes > mem_limit:
            return f"the measured peak of {self.measured_peak_bytes} bytes is over the limit of {mem_limit} bytes"
        if self.max_grad_difference is not None and not self.max_grad_difference <= 4 * self.noise:
            return f"gradients or buffers differ from plain training by up to {self.max_grad_difference:g}"
        return None


@dataclass(frozen=True, slots=True)
class Facts(Report):
    """What a report is made of, and how the command came to it."""

    mem_limit: int
    arguments: tuple[str, ...] = ()
    """What `Checkpointable` has to be given beside the limit to plan the same, as Python."""
    verified: Verified | None = None
    compared: tuple[Row, ...] = ()
    """Every strategy at the limit, the plan first."""
    limited: bool = True
    """Whether there is a limit that was planned for; `sequence` stores everything otherwise."""

    def problem(self) -> str | None:
        """What real steps showed to be wrong, in words, or None."""
        if self.verified is not None and (problem := self.verified.problem(self.mem_limit)) is not None:
            return problem
        for row in self.compared:
            if row.verified is not None and (problem := row.verified.problem(self.mem_limit)) is not None:
                return f"{row.strategy}: {problem}"
        return None

    def as_json(self) -> dict[str, Any]:
        """The report as the command writes it with --json: seconds and bytes."""
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "device": self.device,
            "mem_limit": self.mem_limit,
            "fixed_bytes": self.budget.fixed.total,
            "min_bytes": self.budget.least_bytes(),
            "store_all": {"peak_bytes": self.store_all_bytes, "step_seconds": self.store_all_seconds},
            "plan": {
                "peak_bytes": self.peak_bytes,
                "step_seconds": self.step_seconds,
                "overhead": self.overhead,
                "sequence": str(self.sequence),
                "algorithm": self.sequence.algorithm,
                "gap": self.gap,
            },
            "stages": self._stages_as_json(),
        }
        if self.verified is not None:
            data["verify"] = {
                "measured_peak_bytes": self.verified.measured_peak_bytes,
                "measured_step_seconds": self.verified.measured_step_seconds,
                "max_grad_difference": self.verified.max_grad_difference,
                "plain_peak_bytes": self.verified.plain_peak_bytes,
                "plain_step_seconds": self.verified.plain_step_seconds,
            }
        if self.compared:
            data["compare"] = [row.as_json() for row in self.compared]
        if self.sweep is not None:
            data["sweep"] = self.sweep.as_json()
        if not self.limited:
            del data["mem_limit"], data["plan"]
        return data

    def _stages_as_json(self) -> list[dict[str, Any]]:
        measured = self.measurement
        return [
            {
                "name": name,
                "forward_seconds": cost.forward_seconds,
                "nograd_seconds": cost.nograd_seconds,
                "backward_seconds": cost.backward_seconds,
                "activation_bytes": cost.activation_bytes,
                "saved_bytes": cost.saved_bytes,
                "forward_temp_bytes": cost.forward_temp_bytes,
                "nograd_temp_bytes": cost.nograd_temp_bytes,
                "backward_temp_bytes": cost.backward_temp_bytes,
                "replay_temp_bytes": cost.replay_temp_bytes,
                "in_part": None
                if in_part is None
                else {
                    "forward_seconds": in_part.forward_seconds,
                    "backward_seconds": in_part.backward_seconds,
                    "saved_bytes": in_part.saved_bytes,
                },
                "action": action,
            }
            for name, cost, in_part, action in zip(
                measured.names, measured.stages, measured.in_part_by_stage, self.actions(), strict=True
            )
        ]
