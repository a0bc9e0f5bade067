"""Real steps of batches that were chosen by predictions: their peaks, and their times in turns."""

from __future__ import annotations

from collections.abc import Iterable

from rotor_profiling.timing import several_processes
from rotor_py.batch.largest import Largest
from rotor_py.batch.measured_batches import MeasuredBatches
from rotor_py.batch.search import Rate
from rotor_py.measure.device import available_bytes

_SEVERAL = 3
"""Steps of which the least peak counts, where peaks may come out too large. A guess."""
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
    # On the CPU, the profiler misses a free if a thread of the backend is the last to let go of what was sent: what is
    # found is never less than the peak, and the least of several is closest.
    times = _SEVERAL if network.device.type == "cpu" and several_processes() else 1
    peaks = []
    for _ in range(times):
        with batches.stepping(batch) as step, step.taken(network) as peak:
            peaks.append(peak)
    return int(batches.agreed(min(peaks)))


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


class Trial:
    """Real steps of a batch, and of others that it has to be as fast as."""

    def __init__(self, batches: MeasuredBatches, rate: Rate, mem_limit: int, batch: int) -> None:
        self.batch = batch
        self.peaks = {batch: step_peak(batches, batch)}
        self.rates: dict[int, float] = {}
        """Samples a second in real steps, the optimizer's share included."""
        self._batches, self.rate, self._mem_limit = batches, rate, mem_limit

    @property
    def over(self) -> Largest | None:
        """The least batch whose step takes more than the limit, with what it takes."""
        found = [batch for batch, peak in self.peaks.items() if peak is not None and peak > self._mem_limit]
        return Largest(min(found), self.peaks[min(found)] or 0) if found else None

    def compare(self, others: set[int]) -> None:
        """Turn to the batch with the most samples a second, if there is room for real steps of all of them."""
        self.peaks |= {batch: step_peak(self._batches, batch) for batch in sorted(others - {self.batch})}
        if len(self.peaks) > 1 and self.over is None and None not in self.peaks.values():
            seconds = seconds_in_turns(self._batches, sorted(self.peaks))
            self.rates = {batch: 1 / self.rate.per_sample(each, batch) for batch, each in seconds.items()}
            self.batch = max(self.rates, key=self.rates.__getitem__)
