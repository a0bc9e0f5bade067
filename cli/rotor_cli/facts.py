"""What the command found out, as data: every report is made from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rotor_py.budget import Budget
from rotor_py.measurement import Measurement
from rotor_solver import (
    Chain,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Loss,
    Sequence,
    simulate,
    store_all,
)

if TYPE_CHECKING:
    from rotor_cli.compare import Row
    from rotor_cli.sweep import Sweep

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

    def problem(self, mem_limit: int) -> str | None:
        """What is wrong, in words, or None. Two plain steps may differ by `noise`; so may the planned one."""
        if self.measured_peak_bytes > mem_limit:
            return f"the measured peak of {self.measured_peak_bytes} bytes is over the limit of {mem_limit} bytes"
        if self.max_grad_difference is not None and not self.max_grad_difference <= 4 * self.noise:
            return f"gradients or buffers differ from plain training by up to {self.max_grad_difference:g}"
        return None


@dataclass(frozen=True, slots=True)
class Facts:
    """A measured model, its budget and its plan."""

    title: str
    device: str
    mem_limit: int
    budget: Budget
    measurement: Measurement
    sequence: Sequence
    arguments: tuple[str, ...] = ()
    """What `Checkpointable` has to be given beside the limit to plan the same, as Python."""
    verified: Verified | None = None
    compared: tuple[Row, ...] = ()
    """Every strategy at the limit, the plan first."""
    sweep: Sweep | None = None
    limited: bool = True
    """Whether there is a limit that was planned for; `sequence` stores everything otherwise."""

    @property
    def chain(self) -> Chain:
        return self.budget.chain

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the planned step."""
        return self.budget.peak_bytes(self.sequence)

    @property
    def store_all_bytes(self) -> int:
        """Predicted peak of a step that stores everything."""
        return self.budget.peak_bytes(store_all(self.chain))

    @property
    def step_seconds(self) -> float:
        """Predicted time of the planned forward, loss and backward."""
        return self.seconds_of(self.sequence)

    @property
    def store_all_seconds(self) -> float:
        """Predicted time of the plain forward, loss and backward."""
        return self.seconds_of(store_all(self.chain))

    @property
    def overhead(self) -> float:
        """Planned time as a ratio to the plain one."""
        return self.step_seconds / self.store_all_seconds if self.store_all_seconds else 1.0

    def problem(self) -> str | None:
        """What real steps showed to be wrong, in words, or None."""
        if self.verified is not None and (problem := self.verified.problem(self.mem_limit)) is not None:
            return problem
        for row in self.compared:
            if row.verified is not None and (problem := row.verified.problem(self.mem_limit)) is not None:
                return f"{row.strategy}: {problem}"
        return None

    @property
    def gap(self) -> float | None:
        """How far the plan can be from the best memory-persistent one, certified; None if there is no bound."""
        bound = self.sequence.lower_bound
        if bound is None:
            return None
        makespan = simulate(self.chain, self.sequence).makespan
        return makespan / bound - 1 if bound else 0.0

    def seconds_of(self, sequence: Sequence) -> float:
        """Predicted time of a forward, loss and backward that follow `sequence`."""
        prefix = self.measurement.prefix
        return simulate(self.chain, sequence).makespan + (prefix.seconds if prefix else 0.0)

    def actions(self) -> list[str]:
        """What happens to every stage, in words."""
        runs = [0] * len(self.chain)
        kept: dict[int, str] = {}
        before_loss = True
        for operation in self.sequence:
            match operation:
                case Loss():
                    before_loss = False
                case ForwardEnable(stage):
                    runs[stage] += 1
                    if before_loss:
                        kept[stage] = "stored"
                case ForwardCheck(stage):
                    runs[stage] += 1
                    if before_loss:
                        kept.setdefault(stage, "checkpointed")
                case ForwardNograd(stage):
                    runs[stage] += 1
        return [_action(kept.get(stage), count - 1) for stage, count in enumerate(runs)]

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
            "stages": [
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
                    "action": action,
                }
                for name, cost, action in zip(
                    self.measurement.names, self.measurement.stages, self.actions(), strict=True
                )
            ],
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


def _action(kept: str | None, again: int) -> str:
    times = f"recomputed {again}×" if again else ""
    return ", ".join(part for part in (kept, times) if part)
