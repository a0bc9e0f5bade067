"""Slow twins: all sequences of a small chain one by one, and all cuts of a chain."""

import math
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise

from rotor_solver import Chain, Loss, Stage, simulate
from tests.solver.naive import all_sequences


@cache
def costs(chain: Chain) -> list[tuple[int, int, float]]:
    """Of every sequence, the bytes kept when the loss begins, the peak, and the seconds."""
    found = []
    for sequence in all_sequences(chain):
        result, position = simulate(chain, sequence), sequence.index(Loss())
        kept = result.after[position - 1] if position else chain.input_bytes
        found.append((kept, result.peak, result.makespan))
    return found


def fastest_with_room(chain: Chain, most_kept: int, room: int) -> float:
    """The least seconds with so many bytes kept, and a peak of so many more; infinite if nothing fits."""
    fitting = (each for kept, peak, each in costs(chain) if kept <= most_kept and peak <= most_kept + room)
    return min(fitting, default=math.inf)


def fastest(chain: Chain, limit: int, count: int) -> float:
    """The least seconds within the limit; infinite if nothing fits."""
    fitting = (seconds for kept, peak, seconds in costs(chain) if (count - 1) * kept + peak <= limit)
    return min(fitting, default=math.inf)


def least_bytes(chain: Chain, count: int) -> int:
    return min((count - 1) * kept + peak for kept, peak, _ in costs(chain))


def all_cuts(length: int, parts: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for inner in combinations(range(1, length), parts - 1):
        yield tuple(pairwise((0, *inner, length)))


def cut_off(chain: Chain, begin: int, end: int) -> Chain:
    """Stages begin … end - 1 as the chain of a rank, which keeps its output until the backward."""
    stages: tuple[Stage, ...] = chain.stages[begin:end]
    if end == len(chain):
        return Chain(stages, chain.activation[begin], chain.loss_time, chain.loss_temp, chain.output_held)
    return Chain(stages, chain.activation[begin], output_held=True)
