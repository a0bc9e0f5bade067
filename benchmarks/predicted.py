"""Steps of plans that were made without memory, really taken: predicted beside measured peaks, on the CPU.

    python benchmarks/predicted.py                # all models of the ecosystem, and a chain of layers
    python benchmarks/predicted.py Llama U-Net    # some; --write puts the table into docs/benchmarks.md

All families of the zoo are in `predicted_zoo.py`.

Chain and peaks are predicted with the CPU's own operators. Plans are made from them alone, and then steps follow them,
without memory and really.
Stages are stored whole, in all the parts that are found, or not at all: what can be packed shows in values alone.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import ecosystem
import torch
from cpu_scratch import cpu_scratch_bytes
from predicted_reasons import reason
from report import write
from torch import nn

from rotor_profiling import measured_peak, tensors_in
from rotor_profiling.backends import using
from rotor_profiling.isolate import RandomState
from rotor_py import Checkpointable, models, store_all
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies
from rotor_py.estimation.simulated_target import PredictedDevice
from rotor_py.measure import stage_measurer
from rotor_py.plan import source
from rotor_py.plan.settings import Settings
from rotor_solver import Sequence

CPU = torch.device("cpu")
_NOW = RandomState.now
WITHIN = 0.01
"""The part by which a peak may be off without a reason."""
FIELDS = ("activation_bytes", "saved_bytes", "input_released_bytes", "output_released_bytes")


def resnet18() -> ecosystem.Case:
    labels = torch.zeros(16, dtype=torch.long)
    model: nn.Module = models.resnet18(num_classes=10)
    return model, {"value": torch.randn(16, 3, 96, 96)}, lambda output: nn.functional.cross_entropy(output, labels)


def network(model: nn.Module, inputs: Any, loss: Any) -> Checkpointable:
    optimizer = torch.optim.AdamW(model.train().parameters())
    found = Checkpointable(model, loss=loss, optimizer=optimizer, fresh_grads=True, cache=False)
    found.measure(inputs)
    return found


def random_state_without_memory(devices: tuple[torch.device, ...]) -> RandomState:
    """`RandomState.now`, and the CPU's copy of its random state, which no operator makes."""
    torch.empty_like(torch.get_rng_state())
    return _NOW(devices)


@dataclass
class Step:
    """A step with an optimizer's state, whose caller holds the output to its end."""

    network: Checkpointable
    inputs: dict[str, Any]
    loss: Any
    optimizer: torch.optim.Optimizer

    def __call__(self, begins: Callable[[str], None] = lambda _: None) -> None:
        output = self.network(**self.inputs)
        begins("loss")
        self.loss(output).backward()
        begins("optimizer")
        self.optimizer.step()

    def prepare(self) -> None:
        """Make the optimizer's state."""
        # Gradients of a step by another plan, were they there, would have it planned again.
        self.optimizer.zero_grad()
        self()
        self.optimizer.zero_grad()

    def present(self) -> list[torch.Tensor]:
        state = tensors_in([list(entry.values()) for entry in self.optimizer.state.values()])
        return [*self.network.parameters(), *self.network.buffers(), *state, *tensors_in(self.inputs)]

    def peak(self) -> int:
        self.prepare()
        return measured_peak(self, self.present(), CPU)


def row(name: str, case: Callable[[], ecosystem.Case]) -> dict[str, Any]:
    """The case's stages, how many are held alike without memory, and ratios of peaks at three limits.

    `ratios` are peaks of real steps to those of steps without memory, and `bounds` to what the plans promise, which is
    no less; where one is off, `reasons` say which bytes these are. `chains` are, for the same sequences, the peaks that
    the measured chain promises, to the predicted ones.
    """
    torch.manual_seed(0)
    model, inputs, loss = case()
    # What is without values cannot say where padding is.
    inputs = {key: torch.ones_like(value) if "mask" in key else value for key, value in inputs.items()}
    sample = inputs.get("value", inputs)
    mode = DeviceFakeMode()
    without_memory = FakeCopies(mode)
    # The same ways on both sides, whatever seconds they take: the sequence names them by their position. Layers of a
    # chain are not captured: which of their ways save anything depends on scratch memory.
    with (
        patch.object(Settings, "_keepers", lambda _: ()),
        patch.object(source, "_LEAST_BYTES", math.inf),
        patch.object(stage_measurer, "worth_choosing", lambda _, ways: (*ways,)),
    ):
        with (
            using(PredictedDevice("cpu", 10**12, lambda *call: 1e-6, cpu_scratch_bytes)),
            patch.object(RandomState, "now", random_state_without_memory),
            mode,
        ):
            value = without_memory.value(sample)
            predicted = network(without_memory.model(model), value, loss)
            plans = [planned(predicted, value, loss, share) for share in (1.0, 0.5, 0.0)]
        real = network(model, sample, loss)
    assert real.inspection_values.way_names == predicted.inspection_values.way_names
    pairs = list(zip(real.inspection_values.stages, predicted.inspection_values.stages, strict=True))
    alike = [all(getattr(a, field) == getattr(b, field) for field in FIELDS) for a, b in pairs]
    off = [
        {"stage": name, "field": field, "measured": getattr(a, field), "predicted": getattr(b, field)}
        for name, (a, b) in zip(real.inspection_values.names, pairs, strict=True)
        for field in FIELDS
        if getattr(a, field) != getattr(b, field)
    ]
    budget = real.budget  # as measured: steps may show more than a chain says
    ratios, bounds, chains, reasons = [], [], [], list[str]()
    for plan in plans:
        predicted.sequence = real.sequence = plan.sequence
        with patch.object(Settings, "_keepers", lambda _: ()):
            step = Step(real, _keywords(sample), loss, torch.optim.AdamW(real.parameters()))
            measured = step.peak()
            ratios.append(measured / plan.peak)
            bounds.append(measured / plan.promised)
            reasons.append(reason(step, predicted, measured) if abs(bounds[-1] - 1) > WITHIN else "")
        chains.append(budget.peak_bytes(plan.sequence) / plan.promised)
    most = max((abs(each["measured"] - each["predicted"]) for each in off), default=0)
    found = {"model": name, "stages": len(alike), "equal": sum(alike), "most_bytes_off": most, "off": off}
    return {**found, "ratios": ratios, "bounds": bounds, "chains": chains, "reasons": reasons}


@dataclass(frozen=True)
class Plan:
    """A sequence that was made without memory, what it promises, and what a step by it takes, also without memory."""

    sequence: Sequence
    promised: int
    peak: int


def planned(network: Checkpointable, sample: Any, loss: Any, share: float) -> Plan:
    """The plan at so much of the way from the least limit to that of storing everything."""
    least, stored = network.budget.least_bytes(), network.budget.peak_bytes(store_all(network.chain))
    sequence = network.compute_sequence(int(least + share * (stored - least)))
    network.watch = False
    peak = Step(network, _keywords(sample), loss, torch.optim.AdamW(network.parameters())).peak()
    network.sequence = sequence
    return Plan(sequence, network.budget.peak_bytes(sequence), peak)


def _keywords(sample: Any) -> dict[str, Any]:
    return sample if isinstance(sample, dict) else {"input": sample}


HEAD = "| stages | held alike | measured chain | store-all | half | least | of the promise |"
"""Of the columns of `line` that follow the first one."""


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    off = f", others within {row['most_bytes_off']} B" if row["most_bytes_off"] else ""
    ratios = " | ".join(f"{each:.4f}" for each in row["ratios"])
    chain, bound = (f"{farthest(row[each]):.4f}" for each in ("chains", "bounds"))
    return f"| {row['model']} | {row['stages']} | {row['equal']}{off} | {chain} | {ratios} | {bound} |"


def farthest(ratios: list[float]) -> float:
    """The ratio that is farthest from 1."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = {"ResNet-18, layers": resnet18, **ecosystem.MODELS}
    rows = []
    lines = [f"| model {HEAD}", "| --- |" + " --- |" * 7]
    for name in given.names or cases:
        found = row(name, cases[name])
        rows.append(found)
        lines.append(line(found))
        print(lines[-1], flush=True)
    if given.write:
        write("predicted", "\n".join(lines), rows, CPU)


if __name__ == "__main__":
    main()
