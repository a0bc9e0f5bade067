"""What the solver finds on random chains, for `guard.py`: makespans, peaks and least limits of every algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from rotor_solver import (
    ALGORITHMS,
    Chain,
    InfeasibleError,
    Option,
    Sequence,
    Stage,
    forward_steps,
    frontier,
    least_in_flight,
    limit_for,
    min_bytes,
    moments,
    plan_pipeline,
    recompute_all,
    simulate,
    simulate_forwards,
    skipped_outputs,
    solve,
    solve_in_flight,
    store_all,
)

Record = dict[str, Any]


def digest_of(values: Any) -> str:
    """The first 16 digits of a SHA-256 of the values, as they are written."""
    return sha256("".join(map(str, values)).encode()).hexdigest()[:16]


def number(value: float) -> float:
    """Without the last digits, which depend on the order of sums."""
    return float(f"{value:.10g}")


def random_chain(seed: int, length: int | None = None) -> Chain:
    """Small sizes, where every byte is a slot, or large ones; options, gradients, scratch, and what is released."""
    random = np.random.default_rng(seed)
    length = length or int(random.integers(1, 13) if seed % 5 else random.integers(20, 45))
    large = 10**6 if seed % 3 == 0 else 1

    def size(most: int) -> int:
        return int(random.integers(0, most * large + 1))

    stages: list[Stage] = []
    input_bytes = incoming = size(9)
    for position in range(length):
        activation = size(9)
        options = []
        for option in range(1 if seed % 2 else int(random.integers(1, 4))):
            saved = activation + size(12)
            options.append(
                Option(
                    float(random.integers(1, 9)),
                    float(random.integers(1, 17)) + option,
                    saved,
                    size(6),
                    size(8),
                    size(8) if random.random() < 0.3 else None,
                    f"option {option}",
                )
            )
        least_forward = min(option.forward_time for option in options)
        nograd = least_forward - 0.5 if random.random() < 0.5 else None
        stages.append(
            Stage(
                activation,
                tuple(options),
                nograd_time=nograd,
                nograd_temp=size(6) if random.random() < 0.5 else None,
                gradient=size(5) if seed % 4 == 1 else 0,
                name=f"stage {position}",
                input_released=int(random.integers(0, incoming + 1)) if random.random() < 0.3 else 0,
                output_released=int(random.integers(0, activation + 1)) if random.random() < 0.3 else 0,
                skipped_output_time=0.25 if random.random() < 0.4 else 0.0,
            )
        )
        incoming = activation
    if seed % 8 == 5 and length > 1:  # the last stage leaves what the first one ends
        more = size(5)
        stages[-1] = replace(stages[-1], gradient=stages[-1].gradient + more)
        stages[0] = replace(stages[0], gradient=stages[0].gradient - more)
    return Chain(tuple(stages), input_bytes, float(random.integers(0, 4)), size(4), bool(seed % 7 == 2))


def found_by(chain: Chain, run: Callable[[], Sequence]) -> Any:
    """Makespan, peak and bound of a sequence, or how it is refused."""
    try:
        sequence = run()
    except InfeasibleError as error:
        return ["infeasible", error.min_bytes]
    except ValueError:
        return ["refused"]
    simulated = simulate(chain, sequence)
    bound = sequence.lower_bound
    return [number(simulated.makespan), simulated.peak, None if bound is None else number(bound)]


def record_chain(seed: int) -> Record:
    chain = random_chain(seed)
    least, stored = min_bytes(chain), simulate(chain, store_all(chain))
    found: Record = {
        "least": least,
        "store-all": found_by(chain, lambda: store_all(chain)),
        "recompute-all": found_by(chain, lambda: recompute_all(chain)),
    }

    def limit_at(share: float) -> int:
        return int(least + share * (stored.peak - least))

    found["persistent below the least"] = found_by(chain, lambda: solve(chain, least - 1))
    for name in ALGORITHMS:
        shares = (0.0, 0.15, 0.3, 0.5, 1.0) if name == "persistent" else (0.0, 0.3, 1.0)
        found[name] = [found_by(chain, lambda name=name, at=at: solve(chain, limit_at(at), name)) for at in shares]
        found[name].append(found_by(chain, lambda name=name: solve(chain, limit_at(0.5), name, slots=10)))
    sequence = solve(chain, limit_at(0.15))
    simulated = simulate(chain, sequence)
    found["after every operation"] = digest_of(simulated.after)
    found["during every operation"] = digest_of(simulated.during)
    # Operations by their notation: what their class is made of may change.
    found["moments"] = digest_of(replace(each, operation=str(each.operation)) for each in moments(chain, sequence))
    found["skipped outputs"] = digest_of(sorted(skipped_outputs(sequence)))
    # What takes longer is found for some chains only.
    if seed % 5 == 1:
        found["frontier"] = [[limit, number(seconds)] for limit, seconds in frontier(chain, slots=20)][:12]
    if seed % 5 == 2:
        found["limit for 10 %"] = limit_for(chain, 0.1, slots=20)
    if seed % 3 == 0 and len(chain) <= 12:
        found |= record_forwards(chain)
    if seed % 7 == 4 and len(chain) >= 4:
        found |= record_pipelines(chain)
    return found


def record_forwards(chain: Chain) -> Record:
    """Several forwards in flight: one sequence for all, and those for backwards in reverse."""
    found: Record = {}
    stored = simulate(chain, store_all(chain)).peak
    for forwards in (2, 3):
        for order in ("any", "reverse"):
            name = f"{forwards} in flight, {order}"
            try:
                least = least_in_flight(chain, forwards, order)
                limit = (2 * least + forwards * stored) // 3
                joint = solve_in_flight(chain, max(least, limit), forwards, order, alike=order == "any")
                found[name] = [least, number(joint.makespan), joint.peak, number(joint.lower_bound)]
                if order == "reverse":
                    flying = simulate_forwards(chain, joint.sequences)
                    found[f"{name}, simulated"] = [number(flying.makespan), flying.peak]
            except ValueError as error:
                found[name] = type(error).__name__
    return found


def record_pipelines(chain: Chain) -> Record:
    found: Record = {}
    stored = simulate(chain, store_all(chain)).peak
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-whole"):
        for buffers in (False, True):
            fixed = [position % 3 for position in range(len(chain))]
            try:
                plan = plan_pipeline(chain, 2, 2 * stored, 4, schedule, fixed=fixed, buffers=buffers, slots=50)
            except InfeasibleError as error:
                found[f"{schedule}, {buffers}"] = ["infeasible", error.min_bytes]
                continue
            except ValueError:
                found[f"{schedule}, {buffers}"] = ["refused"]
                continue
            found[f"{schedule}, {buffers}"] = [
                list(plan.cuts),
                number(plan.slowest_seconds),
                None if plan.lower_bound is None else number(plan.lower_bound),
                number(plan.timeline.makespan),
                list(plan.timeline.peaks),
                [part.peak_bytes for part in plan.parts],
                plan.fits,
            ]
    return found


def record_long_chains() -> Record:
    """Chains that are long enough for compiled kernels: different stages, and the same ones again and again."""
    different = random_chain(3, 250)
    again = random_chain(6, 12)
    stages = tuple(replace(stage, input_released=0) for stage in again.stages)
    repeated = replace(again, stages=(stages[0], *stages[1:] * 10))
    found: Record = {}
    for name, chain in (("different", different), ("repeated", repeated)):
        least, stored = min_bytes(chain), simulate(chain, store_all(chain)).peak
        for share in (0.05, 0.3):
            limit = int(least + share * (stored - least))
            found[f"{name}, {share}"] = found_by(
                chain, lambda chain=chain, limit=limit: solve(chain, limit, slots=2000)
            )
    return found


def record_revolve() -> Record:
    return {"forward steps": [[forward_steps(steps, snapshots) for snapshots in (1, 2, 3, 5)] for steps in range(20)]}
