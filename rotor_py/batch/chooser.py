"""What can be chosen among batches: the largest that fit, and the best by the costs that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rotor_py.batch.cost_law import CostLaw
from rotor_py.batch.largest import Largest, largest
from rotor_py.batch.measured_batches import MeasuredBatches
from rotor_py.batch.search import TOLERANCE, Found, Rate, Search
from rotor_py.errors import InfeasibleError
from rotor_py.units import format_bytes, limit_text

_ROUNDS = 4
"""Batches that are measured because they may be best, at most. A guess: times vary from one to the next."""
_ROUNDED = 4 * 512
"""Bytes for each stage by which rounding may bend the line of a size on CUDA, whose blocks have multiples of 512 bytes.
A guess: four blocks that grow."""


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses among `candidates`, within `mem_limit` bytes. `slots` is how finely the solver divides memory."""

    batches: MeasuredBatches
    mem_limit: int
    candidates: Sequence[int]
    slots: int

    def largest(self, *, stored: bool) -> Largest | None:
        """The largest candidate that fits; with everything `stored`, or else by any plan."""

        def needs(batch: int) -> int:
            costs = self.batches.of(batch)
            return costs.stored_bytes if stored else costs.least_bytes

        known = {batch: needs(batch) for batch in self.batches.costs}
        stages = len(next(iter(self.batches.costs.values())).chain)
        slack = _ROUNDED * stages if self.batches.on_cuda else 0
        return largest(self.candidates, needs, known, self.mem_limit, slack)

    def infeasible(self) -> InfeasibleError:
        """The error where not even the smallest candidate fits."""
        batch = self.candidates[0]
        costs = CostLaw(self.batches.costs).of(batch) or self.batches.of(batch)
        least = costs.least_bytes
        return InfeasibleError(
            f"not even a batch of {batch} fits: it needs at least {format_bytes(least)} ({least} bytes), of which "
            f"{costs.budget.split()}; the limit is {format_bytes(self.mem_limit)} ({self.mem_limit} bytes). Try a "
            f"limit of {limit_text(least)}.",
            min_bytes=least,
            mem_limit=self.mem_limit,
            kind="no_batch_fits",
        )

    def search(self, rate: Rate) -> Search:
        """A search among what is measured now."""
        return Search(CostLaw(self.batches.costs), self.mem_limit, rate, self.slots)

    def best(self, rate: Rate, most: int) -> Found:
        """The best candidate up to `most`, which was measured; its bound is that of the last search."""
        candidates = [batch for batch in self.candidates if batch <= most]
        for left in range(_ROUNDS, -1, -1):
            search = self.search(rate)
            found = search.best(candidates)
            measured = min((batch for batch in self.batches.costs if batch in candidates), key=search.per_sample)
            # What is measured is preferred to what is no better than two plans may differ.
            if search.per_sample(measured) <= found.seconds_per_sample * (1 + TOLERANCE) or not left:
                return replace(found, batch=measured, seconds_per_sample=search.per_sample(measured))
            if not self.batches.trains_on(found.batch):
                candidates.remove(found.batch)
        raise AssertionError
