"""Models that fit no laptop, planned on one: how long it takes, how much memory, and what comes of it.

    python benchmarks/predicted_large.py                 # minutes, without a network
    python benchmarks/predicted_large.py --only "Llama 3 8B"
    python benchmarks/predicted_large.py --write         # also into docs/benchmarks.md and benchmarks/results/

Each is planned in a process of its own, from the model's configuration to the report. Seconds are of the processor: the
machine may have other work. Memory is the most that the process had, with all that it has imported.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from report import merged, write

SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
CASES: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {"size": "8B", "device": "h100", "dtype": torch.bfloat16},
    "Llama 3 70B": {"size": "70B", "device": "h100:64", "precision": torch.bfloat16, "shard": "blocks"},
}
"""As in docs/estimate.md: 2 × 4096 tokens on each device, a fused AdamW, gradients that are freed."""


def llama(size: str, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0, **SIZES[size]
    )
    model: torch.nn.Module = LlamaForCausalLM(config).to(dtype)
    return model


def its_own(output: Any) -> torch.Tensor:
    """The loss that the model computes from its labels."""
    loss: torch.Tensor = output.loss
    return loss


def planned(name: str) -> dict[str, Any]:
    """The row of a model: its plan for the device's memory, and the overhead half way down to the least limit."""
    began, began_of_processor = time.perf_counter(), time.process_time()
    from rotor_py import estimate

    warnings.simplefilter("ignore")
    case = dict(CASES[name])
    make = partial(llama, case.pop("size"), case.pop("dtype", torch.float32))
    tokens = torch.zeros(2, 4096, dtype=torch.long)
    sample = {"input_ids": tokens, "labels": tokens}
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)
    report = estimate(make, sample, loss=its_own, optimizer=optimizer, fresh_grads=True, **case)
    took = {"seconds": time.process_time() - began_of_processor, "wall_seconds": time.perf_counter() - began}
    budget = report.budget
    least, stored = budget.least_bytes(), report.store_all_bytes
    half = (least + stored) // 2
    from rotor_solver import Persistent

    overhead = report.seconds_of(budget.solve(half, Persistent())) / report.store_all_seconds - 1
    return {
        "model": name,
        "device": case["device"],
        **took,
        "process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "least_bytes": least,
        "store_all_bytes": stored,
        "limit_bytes": report.mem_limit,
        "overhead": report.overhead - 1,
        "half_bytes": half,
        "overhead_at_half": overhead,
        "reserved_bytes": None if report.reserved is None else report.reserved.reserved_bytes,
    }


HEAD = "| model | devices | planned in, s | process, GB | least, GB | store-all, GB | half way | limit |"


def line(row: dict[str, Any]) -> str:
    sizes = " | ".join(f"{row[f'{name}_bytes'] / 1e9:.1f}" for name in ("least", "store_all"))
    pairs = [(row["overhead_at_half"], row["half_bytes"]), (row["overhead"], row["limit_bytes"])]
    plans = " | ".join(f"+{100 * overhead:.1f} % in {limit / 1e9:.1f} GB" for overhead, limit in pairs)
    return (
        f"| {row['model']} | {row['device']} | {row['seconds']:.0f} | {row['process_bytes'] / 1e9:.2f} | {sizes} "
        f"| {plans} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = []
    for name in options.only:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(planned, [name]))
        print(line(found[-1]), f"{found[-1]['wall_seconds']:.0f} s by the clock", flush=True)
    rows = merged("predicted-large", found, torch.device("cpu"), CASES)
    if options.write:
        table = "\n".join([HEAD, "|" + " --- |" * 8, *map(line, rows)])
        write("predicted-large", table, rows, torch.device("cpu"), how="Computed")


if __name__ == "__main__":
    main()
