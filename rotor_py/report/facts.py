"""The facts of a report: memory, time, stages, provenance and the optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rotor_py.data_sheet import Device, Devices, Reservation, workspace_bytes
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.step_memory import peak_of
from rotor_py.report.batch_choice import BatchChoice
from rotor_py.report.numbers import PlanNumbers
from rotor_py.report.sweep import Sweep
from rotor_py.stage.low_precision import rounded_stages
from rotor_py.units import format_bytes, format_seconds

_ANCHORED = 1.25
"""Error of predicted seconds, as a factor, if efficiencies were fitted to known times. A guess: half as much again as
the largest typical error of steps outside the fit, 7 to 17 % (docs/devices.md). Too low claims false precision.
"""
_GUESSED = 1.6
"""The same without a fit. A guess: the efficiencies of devices with known times differ by about as much."""

_NAMED = 3
"""Most layers that a sentence names."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Exact, predicted and assumed numbers of a step on simulated `devices`.

    `recurrent` names layers that run other operators on the device, so that no number is exact for them.
    """

    devices: Devices
    fixed: FixedMemory
    batch_bytes: int
    measurement: Measurement
    recurrent: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        """One of the devices, which are alike."""
        return self.devices.each

    def seconds(self, seconds: float) -> tuple[float, float]:
        """Lower and upper bound of predicted seconds."""
        factor = _GUESSED if self.device.efficiencies.anchor is None else _ANCHORED
        return seconds / factor, seconds * factor

    def range(self, seconds: float) -> str:
        """Format the bounds of predicted seconds."""
        least, most = self.seconds(seconds)
        return f"{format_seconds(least)} to {format_seconds(most)}"

    @property
    def anchor(self) -> str:
        """The measurement that the seconds were fitted to, in words."""
        return self.device.efficiencies.origin

    def sentences(self) -> tuple[str, ...]:
        """One sentence each for exact, predicted and assumed numbers."""
        return (
            "Nothing was measured. Exact: parameters, gradients, optimizer state, the batch, and what stages return "
            "and keep.",
            *self._inexact,
            "Predicted: peaks, what the allocator reserves, and what kernels need beside that while they run"
            f"{self._predicted_beside}.",
            f"Assumed: {', '.join(self._assumed)}, and batches without padding{self._assumed_beside}.",
        )

    @property
    def _inexact(self) -> tuple[str, ...]:
        found = self.recurrent
        if not found:
            return ()
        first, more = ", ".join(found[:_NAMED]), len(found) - _NAMED
        named = f"{first} and {more} more" if more > 0 else first
        return (
            f"Warning: that is not so of the recurrent layers ({named}): they were planned with operators of the CPU, "
            f"and {'MIOpen' if self.device.vendor == 'amd' else 'cuDNN'} keeps other bytes for their backward, and "
            "takes another time.",
        )

    @property
    def _stand_in(self) -> str:
        if self.device.rates_of is None:
            return ""
        return (
            f"the rates, the bandwidths and the kernels of {self.device.rates_of}, since only the memory of this "
            "device is known; "
        )

    @property
    def _assumed(self) -> tuple[str, ...]:
        rates = f"{self._stand_in}the parts of the data sheet's rates that kernels reach ({self.anchor})"
        if self.device.vendor == "cpu":
            return rates, self._kernels
        workspace, context = workspace_bytes(self.device), self.device.context_bytes
        return (
            rates,
            self._kernels,
            f"{format_bytes(workspace)} for {self._library}",
            f"{format_bytes(context)} for the driver's context beside the limit",
        )

    @property
    def _kernels(self) -> str:
        if self.device.vendor == "cpu":
            return "attention by the CPU's kernel"
        version = ".".join(torch.__version__.split(".")[:2])
        capability = ".".join(map(str, self.device.compute_capability))
        chosen = f"attention by the kernel that torch {version} chooses for compute capability {capability}"
        if self.device.vendor != "amd":
            return chosen
        return f"{chosen} on CUDA, and that kernels of ROCm (AOTriton, MIOpen) keep and take as much as CUDA's"

    @property
    def _library(self) -> str:
        return "hipBLAS" if self.device.vendor == "amd" else "cuBLAS"

    @property
    def _predicted_beside(self) -> str:
        return "" if self.devices.count == 1 else "; parameters that are whole, and gradients on their way"

    @property
    def _assumed_beside(self) -> str:
        return "" if self.devices.count == 1 else "; what devices send to each other is sent while they compute"

    def as_data(self, peaks: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
        """The numbers by kind, in bytes and seconds; seconds as lower and upper bound."""
        fixed = asdict(self.fixed)
        exact = ("parameters", "buffers", "gradients", "optimizer")
        return {
            "device": self.device.name,
            "devices": self.devices.count,
            "compute_capability": list(self.device.compute_capability),
            "exact": {
                **{f"{name}_bytes": fixed[name] for name in exact},
                "batch_bytes": self.batch_bytes,
                "activation_bytes": sum(each.activation_bytes for each in self.measurement.stages),
                "saved_bytes": sum(each.saved_bytes for each in self.measurement.stages),
                "inexact_layers": list(self.recurrent),
            },
            "predicted": {**peaks, "communication_bytes": self.fixed.communication},
            "assumed": {
                **{name: list(self.seconds(value)) for name, value in seconds.items()},
                "rates_of": self.device.rates_of or self.device.name,
                "efficiencies": asdict(self.device.efficiencies),
                "attention_kernel": self._kernels,
                "padding": False,
                "link_bytes_per_second": self.device.link_bandwidth,
                "host_link_bytes_per_second": self.device.pcie_bandwidth,
                "communication_overlaps": self.devices.count > 1,
                "workspace_bytes": workspace_bytes(self.device),
                "context_bytes": self.device.context_bytes,
                "launch_seconds": self.device.launch_seconds,
            },
            "measured": {},
        }


# The facts do not import any renderer, nor the function that finds a sweep.


@dataclass(frozen=True, slots=True)
class ReportFacts(PlanNumbers):
    """The numbers of a plan, its provenance, and the sentences about both."""

    sweep: Sweep | None = None
    """Costs of all limits, if known."""
    compiled: Iterable[str] | None = None
    """Names of the compiled stages; None without `compile`."""
    batches: BatchChoice | None = None
    """How the batch was chosen, if it was."""
    predicted_for: Devices | None = None
    """Simulated devices that the numbers are predicted for; None if measured."""
    recurrent: tuple[str, ...] = ()
    """Names of layers whose prediction is not exact."""
    reserved: Reservation | None = None
    """Predicted reservation of the allocator, if a step was followed."""

    def verdict(self) -> tuple[str, str]:
        """Whether the plan fits and its price: beginning and rest of one sentence."""
        if self.mem_limit is None:
            begin, limit = f"{self.title} is planned", "without a limit"
        else:
            begin = f"{self.title} fits" if self.fits else f"{self.title} does not fit"
            limit = f"in {format_bytes(self.mem_limit)}"
        plain = self.store_all_bytes
        if self.overhead == 1.0 and self.peak_bytes == plain:
            price = "nothing has to be recomputed."
        else:
            price = (
                f"{self.overhead - 1:+.1%} time compared with storing everything, which needs {format_bytes(plain)}."
            )
        return begin, f" {limit} on {self.device}: predicted peak {format_bytes(self.peak_bytes)}, {price}"

    def peak_reason(self) -> str | None:
        """Position of the peak in one sentence; None if it is in forward or backward."""
        running = self.budget.beside_chain(self.sequence) + peak_of(self.chain, self.shown)
        if self.peak_bytes <= running:
            return None
        stepping = self.peak_bytes == self.budget.optimizer_peak_bytes
        return (
            f"The peak is {'in the optimizer step' if stepping else 'in the layers before the chain'}: "
            f"{format_bytes(self.peak_bytes)} there, {format_bytes(running)} in forward and backward. No other plan "
            "needs less there."
        )

    def remarks(self) -> tuple[str, ...]:
        """Sentences that follow the verdict."""
        compiled = None if self.compiled is None else _compiled(len(tuple(self.compiled)), len(self.chain))
        chosen = () if self.batches is None else self.batches.sentences()
        freed = f"{self.budget.gradients_freed()}." if self.budget.freed_gradients else None
        words = self.budget.moved_in_words(self.sequence)
        moved = f"{words[0].upper()}{words[1:]}." if words else None
        warning = None if self.reserved is None else self.reserved.warning(self.peak_bytes)
        others = (warning, self.peak_reason(), moved, freed, self.which_forward(), compiled, self.rounded())
        basis = () if self.basis is None else self.basis.sentences()
        return (*chosen, *(each for each in others if each is not None), *basis)

    def rounded(self) -> str | None:
        """The low-precision stages of the plan in one sentence; None if all are exact."""
        asked = self.measurement.fewer_bits
        if asked is None:
            return None
        stages = len(rounded_stages(self.chain, self.sequence))
        if not stages:
            return f"No stage is kept in {asked}: the plan is exact."
        return (
            f"{stages} of {len(self.chain)} stages {'is' if stages == 1 else 'are'} kept in {asked} for the backward: "
            "the forward is exact, and gradients differ from those of plain training."
        )

    @property
    def basis(self) -> Basis | None:
        """Provenance of the numbers; None if measured."""
        if self.predicted_for is None:
            return None
        fixed = self.budget.fixed
        batch = fixed.batch + self.measurement.input_bytes
        return Basis(self.predicted_for, fixed, batch, self.measurement, self.recurrent)

    def followed_step(self) -> list[tuple[str, str]]:
        """Peak and reservation of a followed step, by name; empty if none was followed."""
        if self.reserved is None:
            return []
        return [
            ("a step (predicted)", format_bytes(self.reserved.step_bytes)),
            ("reserved (predicted)", format_bytes(self.reserved.reserved_bytes)),
        ]

    def times(self) -> list[tuple[str, str]]:
        """Predicted times of a planned and a plain step, by name.

        For a simulated device these are ranges, with the source of the efficiencies.
        """
        basis = self.basis
        said = format_seconds if basis is None else basis.range
        found = [("planned", said(self.step_seconds)), ("store-all", said(self.store_all_seconds))]
        if basis is None:
            return found
        return [*found, ("efficiencies" if basis.device.efficiencies.anchor is None else "fitted to", basis.anchor)]

    def which_forward(self) -> str | None:
        """Which forward in flight is shown, in one sentence; None if all follow one sequence."""
        found = self.by_forwards()
        if len(found) == 1:
            return None
        name = next(name for name, each in found.items() if each.operations == self.shown.operations)
        order = "come in reverse" if self.budget.backward_order == "reverse" else "may come in any order"
        return (
            f"{self.budget.forwards} forwards are in flight at once, by {len(found)} different sequences; their "
            f"backwards {order}. Stages and pictures are those of {name}, where the peak is."
        )


def _compiled(number: int, stages: int) -> str:
    if not number:
        return f"None of {stages} stages runs compiled: none can be, which the log tells, or plain ones are as fast."
    return f"{number} of {stages} stages run compiled."


NAME = "optimizer step"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Memory of the optimizer step in bytes. `fixed` includes the optimizer's state, and gradients if they are kept;
    `scratch` is temporary.
    """

    fixed: int
    input: int
    output: int
    gradients: int
    scratch: int

    @property
    def total(self) -> int:
        """Peak of the optimizer step."""
        return self.fixed + self.input + self.output + self.gradients + self.scratch

    @property
    def sentence(self) -> str:
        """The step in words."""
        return f"{NAME}: {format_bytes(self.total)} while it runs"


def optimizer_step(facts: ReportFacts) -> OptimizerStep | None:
    """The optimizer step of `facts`; None without an optimizer."""
    budget, measurement = facts.budget, facts.measurement
    if budget.step_bytes is None:
        return None
    # A training loop holds the whole output to the end of its step, tensors without gradient included.
    output = budget.forwards * (measurement.stages[-1].activation_bytes + measurement.held_bytes)
    given = budget.forwards * measurement.input_bytes
    return OptimizerStep(
        fixed=budget.fixed.total,
        input=given,
        output=output,
        gradients=budget.stepping_bytes - given - output,
        scratch=budget.step_bytes,
    )


SECONDS = ("forward", "backward")
BYTES = ("output", "kept", "scratch")
HEADINGS = (*SECONDS, *BYTES)


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage: `seconds` and `bytes` in the order of the headings `SECONDS` and `BYTES`, and its action.

    `kind` is the kind of its saved tensors, a key of `numbers.WORDS`.
    """

    name: str
    seconds: tuple[float, float]
    bytes: tuple[int, int, int]
    action: str
    kind: str


def stage_rows(facts: ReportFacts) -> Iterator[StageRow]:
    """Yield a row for each stage, in chain order."""
    measured = facts.measurement
    actions, kinds = facts.actions(), facts.kinds()
    for name, cost, action, kind in zip(measured.names, measured.stages, actions, kinds, strict=True):
        yield StageRow(
            name=name,
            seconds=(cost.forward_seconds, cost.backward_seconds),
            bytes=(
                cost.activation_bytes,
                cost.saved_bytes,
                # A plan may run the stage in any of these ways, so the table shows the largest.
                max(cost.forward_temp_bytes, cost.backward_temp_bytes, cost.nograd_temp_bytes),
            ),
            action=action,
            kind=kind,
        )
