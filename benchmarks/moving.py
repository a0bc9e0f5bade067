"""What moving activations to the host gains on an H100: simulated, on chains with predicted costs.

    python benchmarks/moving.py                 # prints the table; needs transformers
    python benchmarks/moving.py --write         # also into docs/benchmarks.md and benchmarks/results/
    python benchmarks/moving.py "Llama-3 8B"    # only models whose names begin so

Chains are those of `rotor_py.estimate(..., offload="host")`, and plans choose among what that offers: every stage
keeps all or a part, moves what can leave of that, or runs again. With moves alone, it keeps all, or moves what can
leave of it. Bytes are exact, seconds are predicted. The limit is a part of what storing everything takes, of
activations, their gradients and scratch; parameters and their gradients are not in it. The link is what is planned with
for the device: of its 64 GB/s each way, 41.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from report import merged, write
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel

from rotor_py import estimate, models
from rotor_py.stage.protocol import ELSEWHERE
from rotor_solver import Chain, InfeasibleError, Option, Stage, simulate, store_all
from rotor_solver.chain import LARGEST_SIZE
from rotor_solver.offload import Link, MovingPlan, simulate_moves, solve_moving

GB = 10**9
TIMES_LESS = (2, 3, 4, 6)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    sample: Any


def llama(width: int, inside: int, layers: int) -> nn.Module:
    """Without the head: for vocabularies of 128,256 words, trainers compute the loss in pieces."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inside,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=65536,
    )
    return LlamaModel(config).to(torch.bfloat16)


def gpt2_large() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=1280, n_layer=36, n_head=20)).to(torch.bfloat16)


def words(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(batch, length, dtype=torch.long)}


CASES = (
    Case("Llama-3 8B, 1 × 32768 words", lambda: llama(4096, 14336, 32), words(1, 32768)),
    Case("Llama-3 8B, 2 × 4096 words", lambda: llama(4096, 14336, 32), words(2, 4096)),
    Case("Llama-3 1B, 2 × 4096 words", lambda: llama(2048, 8192, 16), words(2, 4096)),
    Case("GPT-2 large, 8 × 1024 words", gpt2_large, words(8, 1024)),
    Case("ResNet-50, 128 images", models.resnet50, torch.empty(128, 3, 224, 224)),
)


def predicted_chain(case: Case) -> tuple[Chain, Link]:
    """The chain of a case on an H100, and the link to its host."""
    with warnings.catch_warnings(action="ignore"):
        found = estimate(case.make, case.sample, "h100", offload="host")
    assert found.budget.link is not None
    return found.chain, found.budget.link


def with_options(chain: Chain, chosen: Callable[[Option], bool]) -> Chain:
    """The chain, with those of its options that are chosen; the first one stays."""
    stages = (replace(stage, options=(stage.options[0], *filter(chosen, stage.options[1:]))) for stage in chain.stages)
    return replace(chain, stages=tuple(stages))


def never_again(stage: Stage) -> Stage:
    """A stage that is never run a second time."""
    return replace(stage, nograd_temp=LARGEST_SIZE // 4)


def measure(case: Case) -> list[Row]:
    chain, link = predicted_chain(case)
    recomputed = with_options(chain, lambda option: not option.moved)
    whole = with_options(chain, lambda option: option.name == ELSEWHERE.name)
    moved = replace(whole, stages=tuple(map(never_again, whole)))
    everything = simulate(recomputed, store_all(recomputed))
    rows = []
    for times in TIMES_LESS:
        limit = everything.peak // times
        row: Row = {"model": case.name, "stages": len(chain), "stored_bytes": everything.peak}
        row |= {"times_less": times, "stored_seconds": everything.makespan}
        row |= {"link_bytes_per_second": link.out_bytes_per_second}
        for name, each in (("recomputed", recomputed), ("moved", moved), ("both", chain)):
            start = time.perf_counter()
            plan = planned(each, limit, link)
            row[name] = None if plan is None else plan.seconds / everything.makespan - 1
            if plan is not None and name == "both":
                seconds = time.perf_counter() - start
                row |= {"gap": plan.gap, "planning_seconds": seconds}
                row["moved_bytes"] = simulate_moves(each, plan.sequence, plan.moves, link).moved
        rows.append(row)
    return rows


def planned(chain: Chain, limit: int, link: Link) -> MovingPlan | None:
    try:
        plan = solve_moving(chain, limit, link)
    except InfeasibleError:
        return None
    for each in (link, Link(10e9, 10e9), Link(400e9, 400e9)):  # the limit holds, however fast the link is
        assert simulate_moves(chain, plan.sequence, plan.moves, each).peak <= limit
    return plan


def table(rows: list[Row]) -> str:
    lines = [
        "| model | stored | times less | recomputed alone | moved alone | both | gap | moved out | planned in |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["recomputed"] is row["both"] is None:
            continue
        ways = " | ".join("–" if row[each] is None else f"{row[each]:+.1%}" for each in ("recomputed", "moved", "both"))
        rest = "– | – | –"
        if row["both"] is not None:
            rest = f"{row['gap']:.1%} | {row['moved_bytes'] / GB:.1f} GB | {row['planning_seconds']:.1f} s"
        stored = f"{row['stored_bytes'] / GB:.1f} GB"
        lines.append(f"| {row['model']} | {stored} | {row['times_less']} | {ways} | {rest} |")
    return "\n".join(lines)


def chosen(names: list[str]) -> list[Case]:
    """The cases whose names begin with one of `names`; all, if there are none."""
    return [case for case in CASES if not names or case.name.startswith(tuple(names))]


def run_chosen(name: str, measure: Callable[[Case], list[Row]], table: Callable[[list[Row]], str]) -> None:
    """The rows of the cases that the command line names; with `--write`, all that are known, into docs and results."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for case in chosen(options.names):
        rows = measure(case)
        print("\n".join(table(rows).splitlines()[2:]), flush=True)
        if options.write:
            device = torch.device("cpu")
            rows = merged(name, rows, device, [each.name for each in CASES])
            write(name, table(rows), rows, device, how="Simulated")


if __name__ == "__main__":
    run_chosen("moving", measure, table)
