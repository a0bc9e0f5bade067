"""The numbers of a plan for its reports, such as peaks and times, and sentences about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from rotor_py.data_sheet import Device, Devices, Reservation, workspace_bytes
from rotor_py.measure.budget import Budget, peak_of
from rotor_py.measure.measurement import Measurement
from rotor_py.report.sweep import BatchChoice, Sweep, format_share
from rotor_py.stage.compression import Packed, rounded_stages, word_of
from rotor_py.stage.protocol import parted
from rotor_py.units import format_bytes, format_seconds
from rotor_solver import Backward, Chain, ForwardCheck, ForwardEnable, Loss, Sequence, Stage, store_all

# What the forward stores of a stage for its backward, in words. The keys are kinds of stages in reports and styles.
WORDS = {
    "kept": "all that the backward needs",
    "part": "a part of it, the rest is recomputed",
    "packed": "packed, with the same bits",
    "rounded": "rounded to fewer bits",
    "elsewhere": "a part of it, the rest is offloaded",
    "input": "only its input",
}


NOISY = 0.10  # Least spread of measured times, as a share, that reports mention: other programs may load the machine.


def kept_kind(stage: Stage, option: int) -> str:
    """Return the key of `WORDS` for an option; if it stores a part, and packs or rounds this: "packed" or "rounded"."""
    way = stage.options[option]
    if way.moved:
        return "elsewhere"
    if word_of([way.name]) is not None:
        return "rounded"
    if parted(way.name, (Packed().name,))[1] is not None:
        return "packed"
    return "part" if option else "kept"


# Factor by which predicted seconds may be off if the device's efficiencies were fitted to known times. A guess: steps
# outside the fit are typically off by 7 to 17 % (docs/devices.md). A lower one claims false precision.
_ANCHORED = 1.25
_GUESSED = 1.6  # The same factor without a fit. A guess: the efficiencies of fitted devices differ by about as much.

_NAMED = 3  # largest number of layers that a sentence names


@dataclass(frozen=True, slots=True)
class Basis:
    """Says which numbers of a step on simulated `devices` are exact, predicted or assumed."""

    facts: ReportFacts
    devices: Devices

    @property
    def device(self) -> Device:
        return self.devices.each

    def seconds(self, seconds: float) -> tuple[float, float]:
        """Return the shortest and the longest time, in seconds, that a prediction of `seconds` may mean."""
        factor = _GUESSED if self.device.efficiencies.anchor is None else _ANCHORED
        return seconds / factor, seconds * factor

    def range(self, seconds: float) -> str:
        return " to ".join(map(format_seconds, self.seconds(seconds)))

    def sentences(self) -> tuple[str, ...]:
        """Return sentences: which numbers are exact (for recurrent layers, none), which predicted, which assumed."""
        device, several, amd = self.device, self.devices.count > 1, self.device.vendor == "amd"
        recurrent = self.facts.recurrent
        found = [
            "Nothing was measured. Exact: parameters, gradients, optimizer state, the batch, and the tensors that "
            "stages return and save."
        ]
        if recurrent:
            first, more = ", ".join(recurrent[:_NAMED]), len(recurrent) - _NAMED
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
            "Predicted: peaks, the bytes that the allocator reserves, and the scratch memory of kernels"
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

    def as_data(self) -> dict[str, Any]:
        """Return exact, predicted and assumed numbers for JSON; a time as the shortest and the longest."""
        facts, fixed = self.facts, asdict(self.facts.budget.fixed)
        exact = ("parameters", "buffers", "gradients", "optimizer")
        peaks = {
            "peak_bytes": facts.peak_bytes,
            "store_all_peak_bytes": facts.store_all_bytes,
            "min_bytes": facts.budget.least_bytes(),
        }
        if (reserved := facts.reserved) is not None:
            peaks |= {
                "step_peak_bytes": reserved.step_bytes,
                "reserved_bytes": reserved.reserved_bytes,
                "reserved_expandable_bytes": reserved.expandable_bytes,
            }
        return {
            "device": self.device.name,
            "devices": self.devices.count,
            "compute_capability": list(self.device.compute_capability),
            "exact": {
                **{f"{name}_bytes": fixed[name] for name in exact},
                "batch_bytes": fixed["batch"] + facts.measurement.input_bytes,
                "activation_bytes": sum(each.activation_bytes for each in facts.measurement.stages),
                "saved_bytes": sum(each.saved_bytes for each in facts.measurement.stages),
                "inexact_layers": list(facts.recurrent),
            },
            "predicted": {**peaks, "communication_bytes": fixed["communication"]},
            "assumed": {
                "step_seconds": list(self.seconds(facts.step_seconds)),
                "store_all_step_seconds": list(self.seconds(facts.store_all_seconds)),
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
    """The numbers of a plan, and sentences about them; computed on access.

    `mem_limit` is the limit in bytes, or None if no limit was set.
    """

    title: str
    device: str
    mem_limit: int | None
    budget: Budget
    measurement: Measurement
    sequence: Sequence
    sweep: Sweep | None = None
    """Curve of time against memory over all limits; None if it has not been solved."""
    compiled: Iterable[str] | None = None
    """Names of the compiled stages; None without `compile`."""
    batches: BatchChoice | None = None
    """The chosen batch and the alternatives; None if the batch was given."""
    predicted_for: Devices | None = None
    """Simulated devices for which all numbers are predicted; None if the numbers are measured."""
    recurrent: tuple[str, ...] = ()
    """Names of recurrent layers on a simulated GPU, for which no number is exact."""
    reserved: Reservation | None = None
    """Predicted bytes that the allocator reserves for a step; None if no step was simulated."""

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
        """The sequence in tables and pictures; if forwards in flight differ, that of the forward at the peak."""
        return self.budget.busiest(self.sequence)[0]

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the planned step, in bytes."""
        return self.budget.peak_bytes(self.sequence)

    @property
    def store_all_bytes(self) -> int:
        """Predicted peak of a step that stores everything, in bytes."""
        return self.budget.peak_bytes(store_all(self.chain))

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of forward, loss and backward by the plan."""
        return self.seconds_of(self.sequence)

    @property
    def store_all_seconds(self) -> float:
        """Predicted seconds of forward, loss and backward with everything stored."""
        return self.seconds_of(store_all(self.chain))

    def seconds_of(self, sequence: Sequence) -> float:
        """Predict the seconds of forward, loss and backward if all forwards in flight follow `sequence`."""
        return self.budget.makespan(sequence) + self.budget.forwards * self.before_chain_seconds

    @property
    def overhead(self) -> float:
        """Ratio of the planned step's seconds to those of storing everything: 1.1 is 10 % more time."""
        return self.overhead_of(self.sequence)

    def overhead_of(self, sequence: Sequence) -> float:
        """Return the ratio of a step's seconds by `sequence` to those of storing everything."""
        return self.seconds_of(sequence) / self.store_all_seconds if self.store_all_seconds else 1.0

    @property
    def gap(self) -> float | None:
        """Upper bound of the share by which the plan is slower than the best; 0.01 is one percent. None if unknown.

        Compares with plans that drop no checkpoint before its use (memory-persistent). The solver has proved that none
        of them takes less than `sequence.lower_bound` seconds for each forward in flight with its backward.
        """
        bound = self.sequence.lower_bound
        if bound is None:
            return None
        makespan = self.budget.makespan(self.sequence) / self.budget.forwards
        return makespan / bound - 1 if bound else 0.0

    @property
    def before_chain_seconds(self) -> float:
        """Seconds that one forward spends in the layers before the chain, which plans do not include."""
        return self.measurement.prefix.seconds if self.measurement.prefix else 0.0

    def by_forwards(self) -> dict[str, Sequence]:
        """Sequences by label: "sequence" if all forwards in flight share one, else "forward 1", "forwards 2 to 4"."""
        if not self.sequence.beside:
            return {"sequence": self.sequence}
        found, end = {}, 0
        for _, group in groupby(self.sequence.of_forwards(self.budget.forwards), key=lambda each: each.operations):
            first, *others = group
            begin, end = end + 1, end + 1 + len(others)
            found[f"forwards {begin} to {end}" if others else f"forward {begin}"] = first
        return found

    def actions(self) -> list[str]:
        """Say for each stage what the plan does with it, such as "stored" or "checkpointed, recomputed 1×"."""
        return [action for action, _ in self.actions_and_kinds()]

    def actions_and_kinds(self) -> list[tuple[str, str]]:
        """Return `actions`, each with what the forward stores of the stage: a key of `WORDS`, or "" for nothing."""
        shown = self.shown
        runs = Counter(each.stage for each in shown if not isinstance(each, Backward | Loss))
        kept: dict[int, tuple[str, str]] = {}
        for operation in shown[: shown.index(Loss())]:  # after the loss, a ForwardEnable is a recomputation
            match operation:
                case ForwardEnable(stage, option):
                    way = self.chain.stages[stage].options[option]
                    size = f"{format_bytes(way.moved)} moved" if way.moved else format_bytes(way.saved)
                    said = f"stored {way.name}: {size}" if option else "stored"
                    kept[stage] = said, kept_kind(self.chain.stages[stage], option)
                case ForwardCheck(stage):
                    # A stage that is checkpointed, then recomputed and stored before the loss, counts as stored.
                    kept.setdefault(stage, ("checkpointed", "input"))
        found = []
        for stage in range(len(self.chain)):
            said, kind = kept.get(stage, ("", ""))
            again = f"recomputed {runs[stage] - 1}×" if runs[stage] > 1 else ""
            found.append((", ".join(filter(None, (said, again))), kind))
        return found

    def verdict(self) -> tuple[str, str]:
        """Return a sentence in two parts, the first for highlighting: whether the plan fits, then its peak and cost."""
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
        """Return sentences about the peak if it is outside the chain's forward and backward, else None."""
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
        """Return the sentences after `verdict`: on batch, memory, gradients, compilation, rounding and predictions."""
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
        """Say for how many stages the plan rounds stored tensors; None without `keep=`."""
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
        """Which numbers of a simulated device are exact, predicted or assumed; None if the numbers are measured."""
        return None if self.predicted_for is None else Basis(self, self.predicted_for)

    def amounts(self) -> dict[str, list[tuple[str, str]]]:
        """Return pairs of label and text under the headings "memory" and "time"; predicted times are ranges."""
        sizes = {
            "fixed": self.budget.fixed.total,
            "least possible": self.budget.least_bytes(),
            "store-all": self.store_all_bytes,
            "planned": self.peak_bytes,
        }
        if (reserved := self.reserved) is not None:
            sizes |= {"a step (predicted)": reserved.step_bytes, "reserved (predicted)": reserved.reserved_bytes}
        memory = [("limit", "none" if self.mem_limit is None else format_bytes(self.mem_limit))]
        memory += [(name, format_bytes(size)) for name, size in sizes.items()]
        basis = self.basis
        said = format_seconds if basis is None else basis.range
        time = [("store-all", said(self.store_all_seconds)), ("planned", said(self.step_seconds))]
        time.append(("overhead", f"{self.overhead - 1:+.1%}"))
        if basis is not None:
            # Predicted seconds rest on assumptions, which partly cancel in the overhead, a ratio: this comes first.
            time.reverse()
            source = basis.device.efficiencies
            time.append(("efficiencies" if source.anchor is None else "fitted to", source.origin))
        if (gap := self.gap) is not None:  # two decimals would read 0.00% below 5e-5
            time.append(("from the optimum", "0 %" if gap < 5e-5 else f"at most {gap:.2%}"))
        if self.measurement.spread >= NOISY:
            time.append(("times vary by", format_share(self.measurement.spread)))
        return {"memory": memory, "time": time}

    def which_forward(self) -> str | None:
        """Say which of the forwards in flight tables and pictures show; None if all forwards follow one sequence."""
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
    """Bytes in memory during the optimizer step. `fixed` includes optimizer state and gradients kept between steps."""

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
    # A training loop holds inputs and outputs of all forwards in flight until the optimizer step.
    output = budget.forwards * measurement.output_bytes
    given = budget.forwards * measurement.input_bytes
    gradients = budget.stepping_bytes - given - output
    return OptimizerStep(budget.fixed.total, given, output, gradients, scratch=budget.step_bytes)


HEADINGS = ("forward", "backward", "output", "kept", "scratch")


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage's row: the numbers under `HEADINGS` with their texts, the plan's action, and a key of `WORDS` or ""."""

    name: str
    numbers: tuple[tuple[float, str], ...]
    action: str
    kind: str


def stage_rows(facts: ReportFacts) -> Iterator[StageRow]:
    measured = facts.measurement
    rows = zip(measured.names, measured.stages, facts.actions_and_kinds(), strict=True)
    for name, cost, (action, kind) in rows:
        seconds = cost.forward_seconds, cost.backward_seconds
        # A plan may run a stage's forward with and without a graph: show the largest scratch, of these or the backward.
        scratch = max(cost.forward_temp_bytes, cost.backward_temp_bytes, cost.nograd_temp_bytes)
        sizes = cost.activation_bytes, cost.saved_bytes, scratch
        numbers = (*((s, format_seconds(s)) for s in seconds), *((size, format_bytes(size)) for size in sizes))
        yield StageRow(name, numbers, action, kind)
