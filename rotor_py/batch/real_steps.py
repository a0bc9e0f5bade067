"""Real steps of batches that were chosen by predictions: their peaks, and their times in turns."""

from __future__ import annotations

from collections.abc import Iterable

from rotor_py.batch.measured_batches import MeasuredBatches
from rotor_py.measure.device import available_bytes

_TURNS = 3
"""Times that every batch has its turn. A guess."""


def step_peak(batches: MeasuredBatches, batch: int) -> int | None:
    """The measured peak of a real step of a batch by its plan, in bytes; of several processes, the largest.

    None if the machine has no room for such a step now. InfeasibleError if it has no plan.
    """
    network = batches.network(batch)
    sequence = network.compute_sequence()
    assert network.budget is not None
    if batches.agreed(network.budget.peak_bytes(sequence) - available_bytes(network.device)) > 0:
        return None
    with batches.stepping(batch) as step, step.taken(network) as peak:
        pass
    return int(batches.agreed(peak))


def seconds_in_turns(batches: MeasuredBatches, among: Iterable[int]) -> dict[int, float]:
    """The seconds of forward, loss and backward, for each batch; of several processes, the slowest's.

    They take turns, so that what disturbs the machine disturbs all of them, and the best turn of each counts: to be
    disturbed only takes longer. A step of each has been taken.
    """
    among = list(among)
    found: dict[int, list[float]] = {batch: [] for batch in among}
    for _ in range(_TURNS):
        for batch in among:
            with batches.stepping(batch) as step:
                found[batch].append(step.seconds(batches.network(batch)))
    return {batch: batches.agreed(min(seconds)) for batch, seconds in found.items()}
