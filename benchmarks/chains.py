"""Chains to solve: random ones, repeated blocks, a transformer, and the reference chains of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from rotor_solver import Chain, Option, Sequence, Stage, min_bytes, simulate, store_all

MIB = 2**20
REFERENCE = Path(__file__).resolve().parent.parent / "tests" / "data" / "chains.json"


def limit_at(chain: Chain, share: float) -> int:
    """The limit that is `share` of the way from the least possible to storing everything."""
    least = min_bytes(chain)
    return int(least + (simulate(chain, store_all(chain)).peak - least) * share)


def overhead(chain: Chain, sequence: Sequence) -> float:
    """How much longer `sequence` takes than storing everything, as a ratio."""
    plain = simulate(chain, store_all(chain)).makespan
    return simulate(chain, sequence).makespan / plain - 1 if plain else 0.0


def gap(chain: Chain, sequence: Sequence) -> float:
    """How much longer `sequence` takes, at most, than the best of all persistent sequences, as a ratio."""
    assert sequence.lower_bound is not None
    return simulate(chain, sequence).makespan / sequence.lower_bound - 1 if sequence.lower_bound else 0.0


def random_chain(length: int, seed: int = 0) -> Chain:
    """No two stages alike: times around 1 ms, activations around 8 MiB, twice that saved, some scratch memory."""
    random = np.random.default_rng((seed, length))

    def sizes(mebibytes: float, spread: float, count: int = length) -> list[int]:
        return [int(size) for size in random.lognormal(np.log(mebibytes * MIB), spread, count)]

    forward = random.lognormal(np.log(1e-3), 0.8, length)
    backward = forward * random.uniform(1.5, 2.5, length)
    activation = sizes(8, 0.8, length + 1)
    return Chain.from_arrays(
        forward_time=forward,
        backward_time=[*backward, 1e-4],
        activation=activation,
        saved=[output + more for output, more in zip(activation[1:], sizes(16, 0.8), strict=True)],
        forward_temp=sizes(2, 1.0),
        backward_temp=[*sizes(4, 1.0), MIB],
    )


def stage(name: str, forward_time: float, activation: int, saved: int, forward_temp: int, backward_temp: int) -> Stage:
    """A stage whose backward takes twice as long as its forward."""
    option = Option(forward_time, 2 * forward_time, saved, forward_temp, backward_temp)
    return Stage(activation, (option,), name=name)


KINDS = (
    stage("wide", 2.1e-3, 24 * MIB, 90 * MIB, 7 * MIB, 31 * MIB),
    stage("middle", 1.3e-3, 13 * MIB, 41 * MIB, 3 * MIB, 17 * MIB),
    stage("narrow", 0.8e-3, 5 * MIB, 22 * MIB, 2 * MIB, 6 * MIB),
)


def repeated(kinds: Iterable[int]) -> Chain:
    return Chain(tuple(KINDS[kind] for kind in kinds), input_bytes=6 * MIB, loss_time=1e-4, loss_temp=MIB)


def in_turns(length: int) -> Chain:
    return repeated(i % 3 for i in range(length))


def in_runs(length: int) -> Chain:
    return repeated(i * 3 // length for i in range(length))


def in_random_order(length: int) -> Chain:
    return repeated(np.random.default_rng(length).integers(0, 3, length).tolist())


def transformer(length: int) -> Chain:
    """An embedding, attention and MLP in turns, and a head: `length` stages in all.

    Four sequences of 2048 tokens, width 4096, 32,000 words, two bytes per number; attention does not keep its scores.
    Times are floating-point operations at 200 TFLOP/s, and bytes at 2 TB/s for the embedding.
    """
    tokens, context, width, words, rate = 4 * 2048, 2048, 4096, 32_000, 2e14
    state, logits = 2 * tokens * width, 2 * tokens * words
    statistics = 8 * tokens
    projections = 2 * tokens * 4 * width**2
    attention = stage(
        "attention",
        (projections + 4 * tokens * context * width) / rate,
        activation=state,
        saved=6 * state + statistics,
        forward_temp=state,
        backward_temp=4 * state,
    )
    mlp = stage(
        "mlp",
        4 * projections / 2 / rate,
        activation=state,
        saved=10 * state + statistics,
        forward_temp=4 * state,
        backward_temp=9 * state,
    )
    embedding = stage("embedding", state / 2e12, activation=state, saved=state, forward_temp=0, backward_temp=state)
    head = stage(
        "head",
        2 * tokens * width * words / rate,
        activation=logits,
        saved=logits + state + statistics,
        forward_temp=state,
        backward_temp=2 * state,
    )
    layers = [attention, mlp] * ((length - 2) // 2)
    return Chain((embedding, *layers, head), input_bytes=8 * tokens, loss_time=1e-3, loss_temp=2 * logits)


def reference_chains() -> list[Chain]:
    names = ("forward_time", "backward_time", "activation", "forward_temp", "backward_temp")
    entries = json.loads(REFERENCE.read_text())
    return [Chain.from_arrays(**{name: entry[name] for name in names}, saved=entry["saved"][1:]) for entry in entries]


FAMILIES: dict[str, Callable[[int], Chain]] = {
    "random": random_chain,
    "three blocks, in turns": in_turns,
    "three blocks, in runs": in_runs,
    "three blocks, random order": in_random_order,
    "transformer": transformer,
}
