"""What more ways to store a stage are worth: predicted overhead with none but whole, with "in part", and with all.

    python benchmarks/ways.py Llama ViT          # on the CPU; prints the table. All models without names
    python benchmarks/ways.py --measured         # trains by the plans with all ways, too, beside plain steps

Each model has twelve small blocks and is measured once. Limits lie between the least for which there is a plan and the
activations where everything is stored; the three plans of a row differ in nothing but the ways that the solver may
choose among. A last line says what finding and measuring the ways took, in seconds of the processor and plain steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from ecosystem import CLASSES, Case, images, its_own, llama, words

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable, format_bytes, store_all
from rotor_solver import Chain, InfeasibleError, Sequence, min_bytes, simulate, solve

SHARES = (0.5, 0.35, 0.25, 0.15)
BLOCKS = 12
CHOICES: dict[str, Callable[[str], bool]] = {
    "whole": lambda way: not way,
    "two ways": lambda way: way in ("", "in part"),
    "all": lambda way: True,
}


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_positions=256, n_embd=128, n_layer=BLOCKS, n_head=4)
    return GPT2LMHeadModel(config), words(4, 256), its_own


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
        num_labels=10,
        problem_type=CLASSES,
    )
    return ViTForImageClassification(config), images(16, 64), its_own


CASES: dict[str, Callable[[], Case]] = {
    "Llama": lambda: llama(layers=BLOCKS),
    "Llama, 1,024 words": lambda: llama(layers=BLOCKS, batch=1, length=1024),
    "GPT-2": gpt2,
    "ViT": vit,
    "tiny": lambda: llama(width=32, layers=2, batch=1, length=64),
}


def processor_seconds() -> float:
    return sum(os.times()[:2])


def choosing(chain: Chain, allowed: Callable[[str], bool]) -> Chain:
    """The chain whose stages can be stored by ways of these names alone."""
    stages = (
        replace(stage, options=tuple(option for option in stage.options if allowed(option.name))) for stage in chain
    )
    return replace(chain, stages=tuple(stages))


def run(name: str, make: Callable[[], Case], *, measured: bool) -> None:
    torch.manual_seed(0)
    model, inputs, loss = make()
    model.train()
    plain = plain_seconds(model, inputs, loss)
    began = processor_seconds()
    planned = Checkpointable(model, loss=loss, fresh_grads=True, cache=False)
    planned.measure(inputs)
    took = processor_seconds() - began
    assert planned.budget is not None
    assert planned.inspection_values is not None
    chain, budget = planned.budget.chain, planned.budget
    stored, least = simulate(chain, store_all(chain)), min_bytes(chain)
    ways = sorted({way for names in planned.inspection_values.way_names for way in names})
    print(f"{name}: {len(chain)} stages, activations of {format_bytes(stored.peak)}; ways: {'; '.join(ways)}")
    print("| limit | " + " | ".join(CHOICES) + " | ways used |" + (" measured |" if measured else ""))
    for share in SHARES:
        limit = int(least + share * (stored.peak - least))
        overheads, last = [], None
        for allowed in CHOICES.values():  # that of all ways comes last
            allowed_chain = choosing(chain, allowed)
            last = solved(allowed_chain, limit)
            seconds = None if last is None else simulate(allowed_chain, last).makespan
            overheads.append("no plan" if seconds is None else f"{seconds / stored.makespan:.3f}")
        row = [f"{share:.0%}: {limit / stored.peak:.0%} of all", *overheads, used(chain, last)]
        if measured and last is not None:
            planned.sequence = last
            row.append(trained(planned, inputs, loss, plain, budget.peak_bytes(last)))
        print("| " + " | ".join(row) + " |", flush=True)
    print(f"measured in {took:.1f} s, {took / plain:.0f} plain steps of {plain:.3f} s\n", flush=True)


def solved(chain: Chain, limit: int) -> Sequence | None:
    try:
        return solve(chain, limit)
    except InfeasibleError:
        return None


def used(chain: Chain, sequence: Sequence | None) -> str:
    """How often stages are stored by each way other than whole."""
    options = [each for each in sequence or () if getattr(each, "option", 0)]
    names = [chain.stages[each.stage].options[each.option].name for each in options]  # type: ignore[union-attr]  # an Fe
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "none"


def step(network: Any, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor]) -> None:
    network.zero_grad(set_to_none=True)
    loss(network(**inputs)).backward()


def plain_seconds(network: Any, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor], runs: int = 5) -> float:
    """Processor seconds of a step: the median of a few."""
    step(network, inputs, loss)
    found = []
    for _ in range(runs):
        began = time.process_time()
        step(network, inputs, loss)
        found.append(time.process_time() - began)
    return statistics.median(found)


def trained(
    planned: Checkpointable, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor], plain: float, predicted: int
) -> str:
    seconds = plain_seconds(planned, inputs, loss)
    present: Collection[torch.Tensor] = [*planned.parameters(), *planned.buffers(), *tensors_in(inputs)]
    planned.zero_grad(set_to_none=True)
    peak = measured_peak(lambda: step(planned, inputs, loss), present, torch.device("cpu"))
    return f"{seconds / plain:.3f}, peak {peak / predicted:.3f} of the predicted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=", ".join(CASES))
    parser.add_argument("--measured", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.models or [name for name in CASES if name != "tiny"]:
        run(name, CASES[name], measured=arguments.measured)


if __name__ == "__main__":
    main()
