"""Facts of a plan for its reports: peaks, times and their provenance, storage kinds, stages and sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from rotor_py.data_sheet import Device, Devices, Reservation, workspace_bytes
from rotor_py.measure.budget import Budget, peak_of
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.measure.measurement import Measurement
from rotor_py.report.sweep import BatchChoice, Sweep, format_share
from rotor_py.stage.compression import Packed, rounded_stages, word_of
from rotor_py.stage.protocol import parted
from rotor_py.units import format_bytes, format_seconds
from rotor_solver import Chain, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence, Stage, store_all

# What a stage stores for its backward, in words, by storage kind.
WORDS = {
    "kept": "all that the backward needs",
    "part": "a part of it, the rest is recomputed",
    "packed": "packed, with the same bits",
    "rounded": "rounded to fewer bits",
    "elsewhere": "a part of it, the rest is offloaded",
    "input": "only its input",
}


NOISY = 0.10  # Relative spread of stage times from which reports mention it: other programs load the machine.


def kept_kind(stage: Stage, option: int) -> str:
    """Return the storage kind of a stage's option. A partial option that packs or rounds is "packed" or "rounded"."""
    way = stage.options[option]
    if way.moved:
        return "elsewhere"
    if word_of([way.name]) is not None:
        return "rounded"
    if parted(way.name, (Packed().name,))[1] is not None:
        return "packed"
    return "part" if option else "kept"


# Error factor of predicted seconds if efficiencies were fitted to known times. A guess: 1.5 times the largest typical
# error of steps outside the fit, 7 to 17 % (docs/devices.md). Too low a factor claims false precision.
_ANCHORED = 1.25
_GUESSED = 1.6  # Error factor without a fit. A guess: efficiencies of devices with known times differ by about as much.

_NAMED = 3  # most layers that a sentence names


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
        return self.devices.each

    def seconds(self, seconds: float) -> tuple[float, float]:
        """Lower and upper bound of predicted seconds."""
        factor = _GUESSED if self.device.efficiencies.anchor is None else _ANCHORED
        return seconds / factor, seconds * factor

    def range(self, seconds: float) -> str:
        return " to ".join(map(format_seconds, self.seconds(seconds)))

    def sentences(self) -> tuple[str, ...]:
        """Return one sentence each about the exact, the predicted and the assumed numbers."""
        device, several, amd = self.device, self.devices.count > 1, self.device.vendor == "amd"
        found = [
            "Nothing was measured. Exact: parameters, gradients, optimizer state, the batch, and the tensors that "
            "stages return and save."
        ]
        if self.recurrent:
            first, more = ", ".join(self.recurrent[:_NAMED]), len(self.recurrent) - _NAMED
            found.append(
                f"Warning: for the recurrent layers ({first}{f' and {more} more' if more > 0 else ''}), no number is "
                f"exact: they were planned with the CPU's operators, and {'MIOpen' if amd else 'cuDNN'} saves other "
                "bytes for the backward, and takes another time."
            )
        parts = f"the shares of the data sheet's rates that kernels reach ({device.efficiencies.origin})"
        assumed = [parts, self._kernels]
        if device.rates_of is not None:
            assumed[0] = (
                f"the rates, the bandwidths and the kernels of {device.rates_of}, since only the memory of this device "
                f"is known; {assumed[0]}"
            )
        if device.vendor != "cpu":
            assumed += [
                f"{format_bytes(workspace_bytes(device))} for {'hipBLAS' if amd else 'cuBLAS'}",
                f"{format_bytes(device.context_bytes)} for the driver's context, outside the limit",
            ]
        return (
            *found,
            "Predicted: peaks, what the allocator reserves, and the scratch memory of kernels"
            f"{'; gathered parameters, and gradients that are sent' if several else ''}.",
            f"Assumed: {', '.join(assumed)}, and batches without padding"
            f"{'; devices send to each other while they compute' if several else ''}.",
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
        return f"{chosen} on CUDA, and that kernels of ROCm (AOTriton, MIOpen) save and need as many bytes as CUDA's"

    def as_data(self, peaks: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
        """Return exact, predicted and assumed numbers in bytes and seconds; a time is a lower and an upper bound."""
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


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """The numbers of a plan, its provenance, and the sentences about both; computed on access.

    `mem_limit`, in bytes, is None if none was set.
    """

    title: str
    device: str
    mem_limit: int | None
    budget: Budget
    measurement: Measurement
    sequence: Sequence
    sweep: Sweep | None = None
    """Costs of all limits, if known."""
    compiled: Iterable[str] | None = None
    """Names of the compiled stages; None without `compile`."""
    batches: BatchChoice | None = None
    """How the batch was chosen; None if it was given."""
    predicted_for: Devices | None = None
    """Simulated devices that the numbers are predicted for; None if measured."""
    recurrent: tuple[str, ...] = ()
    """Names of recurrent layers, for which no number is exact."""
    reserved: Reservation | None = None
    """Predicted reservation of the allocator; None if no step was simulated."""

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the limit."""
        return self.mem_limit is None or self.peak_bytes <= self.mem_limit

    @property
    def chain(self) -> Chain:
        """The measured chain, in seconds and bytes."""
        return self.budget.chain

    @property
    def shown(self) -> Sequence:
        """The displayed sequence. If forwards in flight follow different sequences, that of the forward at the peak."""
        return self.budget.busiest(self.sequence)[0]

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

    def seconds_of(self, sequence: Sequence) -> float:
        """Return the predicted time of forward, loss and backward if all forwards in flight follow `sequence`."""
        return self.budget.makespan(sequence) + self.budget.forwards * self.before_chain_seconds

    @property
    def overhead(self) -> float:
        """Ratio of planned to plain time."""
        return self.step_seconds / self.store_all_seconds if self.store_all_seconds else 1.0

    @property
    def gap(self) -> float | None:
        """Upper bound of the distance to the best memory-persistent plan, as a share of time; None without a bound.

        The solver has proved that each forward of such a plan takes at least `sequence.lower_bound` seconds.
        """
        bound = self.sequence.lower_bound
        if bound is None:
            return None
        makespan = self.budget.makespan(self.sequence) / self.budget.forwards
        return makespan / bound - 1 if bound else 0.0

    def quality(self) -> list[tuple[str, str]]:
        """Distance from the optimum, if bounded, and the spread of noisy measured times, by name."""
        gap, spread, found = self.gap, self.measurement.spread, []
        if gap is not None:  # at 5e-5, two digits would show nothing
            found.append(("from the optimum", "0 %" if gap < 5e-5 else f"at most {gap:.2%}"))
        if spread >= NOISY:
            found.append(("times vary by", format_share(spread)))
        return found

    @property
    def before_chain_seconds(self) -> float:
        """Time of the layers before the chain, which are not planned."""
        return self.measurement.prefix.seconds if self.measurement.prefix else 0.0

    def by_forwards(self) -> dict[str, Sequence]:
        """Sequences of forwards in flight by label: `forward 1`, `forwards 2 to 4`."""
        if not self.sequence.beside:
            return {"sequence": self.sequence}
        found, end = {}, 0
        for _, group in groupby(self.sequence.of_forwards(self.budget.forwards), key=lambda each: each.operations):
            first, *others = group
            begin, end = end + 1, end + 1 + len(others)
            found[f"forwards {begin} to {end}" if others else f"forward {begin}"] = first
        return found

    def kinds(self) -> list[str]:
        """Return what the forward stores of each stage: a key of `WORDS`, or "" for nothing."""
        found = [""] * len(self.chain)
        for operation in self.shown:
            match operation:
                case Loss():
                    break
                case ForwardEnable(stage, option):
                    found[stage] = kept_kind(self.chain.stages[stage], option)
                case ForwardCheck(stage):
                    found[stage] = found[stage] or "input"
        return found

    def actions(self) -> list[str]:
        """Return what the plan does with each stage: "stored", "checkpointed, recomputed 1×"."""
        runs = [0] * len(self.chain)
        kept: dict[int, str] = {}
        before_loss = True
        for operation in self.shown:
            match operation:
                case Loss():
                    before_loss = False
                case ForwardEnable(stage, option):
                    runs[stage] += 1
                    if before_loss:  # after the loss, a ForwardEnable is a recomputation
                        way = self.chain.stages[stage].options[option]
                        size = f"{format_bytes(way.moved)} moved" if way.moved else format_bytes(way.saved)
                        kept[stage] = f"stored {way.name}: {size}" if option else "stored"
                case ForwardCheck(stage):
                    runs[stage] += 1
                    # A sequence may recompute a stage before the loss and store it then; the last storage counts.
                    if before_loss:
                        kept.setdefault(stage, "checkpointed")
                case ForwardNograd(stage):
                    runs[stage] += 1
        again = [f"recomputed {count - 1}×" if count > 1 else "" for count in runs]
        return [", ".join(part for part in (kept.get(at, ""), each) if part) for at, each in enumerate(again)]

    def verdict(self) -> tuple[str, str]:
        """Say whether the plan fits and what it costs: the beginning and the rest of one sentence."""
        if self.mem_limit is None:
            begin, limit = f"{self.title} is planned", "without a limit"
        else:
            begin = f"{self.title} fits" if self.fits else f"{self.title} does not fit"
            limit = f"in {format_bytes(self.mem_limit)}"
        price, plain = "nothing has to be recomputed", self.store_all_bytes
        if self.overhead != 1.0 or self.peak_bytes != plain:
            price = f"{self.overhead - 1:+.1%} time compared with storing everything, which needs {format_bytes(plain)}"
        return begin, f" {limit} on {self.device}: predicted peak {format_bytes(self.peak_bytes)}, {price}."

    def peak_reason(self) -> str | None:
        """Say why the peak is outside forward and backward; None if it is inside."""
        running = self.budget.beside_chain(self.sequence) + peak_of(self.chain, self.shown)
        if self.peak_bytes <= running:
            return None
        stepping = self.peak_bytes == self.budget.optimizer_peak_bytes
        return (
            f"The peak is in the {'optimizer step' if stepping else 'layers before the chain'}: "
            f"{format_bytes(self.peak_bytes)} there, {format_bytes(running)} in forward and backward. No other plan "
            "needs less there."
        )

    def remarks(self) -> tuple[str, ...]:
        """Sentences that follow the verdict."""
        compiled = None
        if self.compiled is not None:
            number, stages = len(tuple(self.compiled)), len(self.chain)
            why = "" if number else ": none can be compiled (see the log), or uncompiled stages are as fast"
            compiled = f"{number or 'None'} of {stages} stages {'run' if number else 'runs'} compiled{why}."
        chosen = () if self.batches is None else self.batches.sentences()
        freed = f"{self.budget.gradients_freed()}." if self.budget.freed_gradients else None
        words = self.budget.moved_in_words(self.sequence)
        moved = f"{words[0].upper()}{words[1:]}." if words else None
        warning = None if self.reserved is None else self.reserved.warning(self.peak_bytes)
        others = (warning, self.peak_reason(), moved, freed, self.which_forward(), compiled, self.rounded())
        basis = () if self.basis is None else self.basis.sentences()
        return (*chosen, *filter(None, others), *basis)

    def rounded(self) -> str | None:
        """Say how many stages the plan keeps in low precision; None without `keep=`."""
        asked = self.measurement.fewer_bits
        if asked is None:
            return None
        number = len(rounded_stages(self.chain, self.sequence))
        if not number:
            return f"No stage is kept in {asked}: the plan is exact."
        return (
            f"{number} of {len(self.chain)} stages {'is' if number == 1 else 'are'} kept in {asked} for the backward: "
            "the forward is exact, and gradients differ from those of plain training."
        )

    @property
    def basis(self) -> Basis | None:
        """Provenance of predicted numbers; None if the numbers are measured."""
        if self.predicted_for is None:
            return None
        fixed = self.budget.fixed
        batch = fixed.batch + self.measurement.input_bytes
        return Basis(self.predicted_for, fixed, batch, self.measurement, self.recurrent)

    def followed_step(self) -> list[tuple[str, str]]:
        """Return peak and reservation of the simulated step by name; empty if no step was simulated."""
        if self.reserved is None:
            return []
        sizes = {"a step": self.reserved.step_bytes, "reserved": self.reserved.reserved_bytes}
        return [(f"{name} (predicted)", format_bytes(size)) for name, size in sizes.items()]

    def times(self) -> list[tuple[str, str]]:
        """Return the times of a planned and a plain step by name; for a simulated device, ranges and their source."""
        basis = self.basis
        said = format_seconds if basis is None else basis.range
        found = [("planned", said(self.step_seconds)), ("store-all", said(self.store_all_seconds))]
        if basis is None:
            return found
        source = basis.device.efficiencies
        return [*found, ("efficiencies" if source.anchor is None else "fitted to", source.origin)]

    def which_forward(self) -> str | None:
        """Say which forward in flight the report shows; None if all follow one sequence."""
        found = self.by_forwards()
        if len(found) == 1:
            return None
        name = next(name for name, each in found.items() if each.operations == self.shown.operations)
        order = "come in reverse" if self.budget.backward_order == "reverse" else "may come in any order"
        return (
            f"{self.budget.forwards} forwards are in flight at once, by {len(found)} different sequences; their "
            f"backwards {order}. Stages and pictures are those of {name}, where the peak is."
        )


NAME = "optimizer step"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Memory of the optimizer step in bytes. `fixed` includes the optimizer's state, and gradients if they are kept."""

    fixed: int
    input: int
    output: int
    gradients: int
    scratch: int

    @property
    def total(self) -> int:
        return self.fixed + self.input + self.output + self.gradients + self.scratch


def optimizer_step(facts: ReportFacts) -> OptimizerStep | None:
    budget, measurement = facts.budget, facts.measurement
    if budget.step_bytes is None:
        return None
    # A training loop holds the whole output to the end of its step, tensors without gradient included.
    output = budget.forwards * measurement.output_bytes
    given = budget.forwards * measurement.input_bytes
    gradients = budget.stepping_bytes - given - output
    return OptimizerStep(budget.fixed.total, given, output, gradients, scratch=budget.step_bytes)


HEADINGS = ("forward", "backward", "output", "kept", "scratch")


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage: seconds and bytes in the order of `HEADINGS`, as number and text; action, and `kind` of its storage."""

    name: str
    numbers: tuple[tuple[float, str], ...]
    action: str
    kind: str


def stage_rows(facts: ReportFacts) -> Iterator[StageRow]:
    measured = facts.measurement
    for name, cost, action, kind in zip(measured.names, measured.stages, facts.actions(), facts.kinds(), strict=True):
        seconds = cost.forward_seconds, cost.backward_seconds
        # A plan may run the stage's forward with or without a graph, so the table shows the largest scratch memory.
        scratch = max(cost.forward_temp_bytes, cost.backward_temp_bytes, cost.nograd_temp_bytes)
        sizes = cost.activation_bytes, cost.saved_bytes, scratch
        numbers = (*((s, format_seconds(s)) for s in seconds), *((size, format_bytes(size)) for size in sizes))
        yield StageRow(name, numbers, action, kind)
