"""Pipelines: what the planned cuts and sequences gain over equal cuts under one policy, simulated.

    python benchmarks/pipeline.py [--write]

With --write, the table also goes into docs/benchmarks.md and benchmarks/results/.

A large transformer has the sizes of Megatron-LM with sequence parallelism (Korthikanti et al., 2022, arXiv 2205.05198:
34 · s · b · h bytes of activations in a layer, over the t processes of a tensor-parallel group; no attention scores),
times are floating-point operations at half of what an A100 can do. The other chains are those of the solver's tests.
Ratios are those of simulated steps; a dash means that nothing fits.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from chains import in_runs, limit_at, random_chain, stage
from report import write

from rotor_solver import Chain, InfeasibleError, PipelinePlan, plan_pipeline, simulate, store_all
from rotor_solver.pipeline import equal_cuts

GB = 10**9
PEAK, EFFICIENCY = 312e12, 0.5
"""An A100's operations per second in bfloat16, and the part of them that is reached."""
PARAMETER = 7.5
"""Bytes on a rank for every parameter: two for it, four for its gradient, and twelve of Adam's over eight processes."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    chain: Chain
    ranks: int
    limit: int
    microbatches: int
    schedule: str = "1f1b"
    fixed: tuple[int, ...] | None = None


def transformer(
    layers: int, width: int, words: int, context: int, tensor_parallel: int
) -> tuple[Chain, tuple[int, ...]]:
    """Embedding, attention and MLP in turns, and a head, for one sequence; and the fixed bytes of every stage."""
    state = 2 * context * width // tensor_parallel  # bytes of what goes from stage to stage
    rate = PEAK * EFFICIENCY * tensor_parallel
    attention = stage(
        "attention",
        (8 * context * width**2 + 2 * context**2 * width) / rate,  # causal: half of the scores
        activation=state,
        saved=int(6.5 * state),
        forward_temp=2 * state,
        backward_temp=4 * state,
    )
    mlp = stage(
        "mlp",
        16 * context * width**2 / rate,
        activation=state,
        saved=int(10.5 * state),
        forward_temp=4 * state,
        backward_temp=8 * state,
    )
    embedding = stage("embedding", 1e-4, activation=state, saved=state, forward_temp=0, backward_temp=state)
    logits = 4 * context * words // tensor_parallel
    head = stage(
        "head",
        2 * context * width * words / rate,
        activation=logits,
        saved=logits + state,
        forward_temp=logits,
        backward_temp=logits,
    )
    parameters = [words * width, *[4 * width**2, 8 * width**2] * layers, words * width]
    chain = Chain((embedding, *[attention, mlp] * layers, head), 8 * context, 1e-3, logits)
    return chain, tuple(int(PARAMETER * each / tensor_parallel) for each in parameters)


def cases() -> list[Case]:
    found = []
    for context in (8192, 16384, 24576, 32768):
        chain, fixed = transformer(96, 12288, 51200, context, 8)
        for schedule in ("1f1b", "interleaved") if context == 24576 else ("1f1b",):
            found.append(Case(f"GPT-3 175B, {context} tokens", chain, 8, 80 * GB, 32, schedule, fixed))
    chain, fixed = transformer(48, 6144, 51200, 8192, 8)
    found += [Case("GPT 22B, 8192 tokens", chain, 4, limit * GB, 16, fixed=fixed) for limit in (8, 12)]
    for name, chain in (("100 different stages", random_chain(100)), ("three blocks, in runs", in_runs(96))):
        for share in (0.1, 0.25):
            found.append(Case(name, chain, 8, limit_at(chain, share), 32))
    chain = in_runs(96)
    found += [Case("three blocks, in runs", chain, 8, limit_at(chain, 0.5), 32, "gpipe")]
    found += [Case("three blocks, in runs", chain, 4, limit_at(chain, 0.5), 16, "zero-bubble-whole")]
    return found


def measure(case: Case) -> dict[str, Any]:
    start = time.perf_counter()
    plan = plan_pipeline(case.chain, case.ranks, case.limit, case.microbatches, case.schedule, fixed=case.fixed)
    seconds = time.perf_counter() - start
    assert plan.fits
    policies = equal_cuts(case.chain, plan, fixed=case.fixed)
    best = next((each for each in policies if each.plan.fits), None)
    everything = next(each for each in policies if each.policy == "recompute everything")
    stored = simulate(case.chain, store_all(case.chain)).makespan
    return {
        "chain": case.name,
        "stages": len(case.chain),
        "ranks": case.ranks,
        "schedule": case.schedule,
        "microbatches": case.microbatches,
        "limit_bytes": case.limit,
        "step_seconds": plan.timeline.makespan,
        "bubble": plan.timeline.bubble,
        "slowest": plan.slowest_seconds * case.ranks / stored,
        "gap": plan.slowest_seconds / plan.lower_bound - 1 if plan.lower_bound else None,
        "policy": best.policy if best else None,
        "best_policy": _ratio(best.plan if best else None, plan),
        "recompute_everything": _ratio(everything.plan if everything.plan.fits else None, plan),
        "equal_cuts_own_plans": _ratio(_own_plans(case, policies[0].plan), plan),
        "planning_seconds": seconds,
    }


def _own_plans(case: Case, equal: PipelinePlan) -> PipelinePlan | None:
    """Equal cuts, with the best plan on each rank."""
    arguments = (case.chain, case.ranks, case.limit, case.microbatches, case.schedule)
    try:
        return plan_pipeline(*arguments, fixed=case.fixed, boundaries=equal.cuts)
    except InfeasibleError:
        return None


def _ratio(other: PipelinePlan | None, plan: PipelinePlan) -> float | None:
    return None if other is None else other.timeline.makespan / plan.timeline.makespan


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| chain | ranks, schedule | limit | slowest rank | equal cuts, best policy | equal cuts, all recomputed | "
        "equal cuts, own plans | gap | planned in |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratios = [row[each] for each in ("best_policy", "recompute_everything", "equal_cuts_own_plans")]
        shown = " | ".join("–" if each is None else f"{each:.2f} ×" for each in ratios)
        gap = "" if row["gap"] is None else f"{row['gap']:.1%}"
        lines.append(
            f"| {row['chain']} | {row['ranks']}, {row['schedule']} | {row['limit_bytes'] / GB:.3g} GB | "
            f"{row['slowest'] - 1:+.1%} | {shown} | {gap} | {row['planning_seconds']:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = []
    for case in cases():
        rows.append(measure(case))
        print(table(rows[-1:]).splitlines()[-1], rows[-1]["policy"], flush=True)
    if options.write:
        write("pipeline", table(rows), rows, torch.device("cpu"))


if __name__ == "__main__":
    main()
