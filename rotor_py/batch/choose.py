"""How large a batch: `largest_batch` and `best_batch`.

# Note [Choosing a batch]
#
#  1. Two small batches are measured, stage by stage. The line through them leads to the next one to measure, until the
#     largest batch is known that fits, and the largest that fits with everything stored (`largest`). No step is tried to
#     see whether it runs out of memory: that would leave other processes waiting.
#  2. The best batch is looked for between the measured ones, where costs are affine (`cost_law`, `search`). It is measured,
#     which may bend the lines: then it is looked for again, a few times. The answer is always a batch that was measured.
#  3. A real step is taken. If its peak is over the limit, only smaller batches are candidates, and all of it is done
#     again with what is known.
#  4. Processes that train together see the same costs (`agreed_costs`), and nothing else decides. So all of them measure
#     the same batches, and come to the same answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rotor_py.batch.cost_law import CostLaw
from rotor_py.batch.curve import curve
from rotor_py.batch.largest import Largest, largest
from rotor_py.batch.measured_batches import MeasuredBatches
from rotor_py.batch.search import TOLERANCE, Found, Rate, Search
from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import InfeasibleError
from rotor_py.report.batch_choice import Aim, BatchChoice
from rotor_py.units import format_bytes, limit_text
from rotor_solver.progress import Progress

_log = logging.getLogger("rotor_py")
_PROBES = (2, 4)
"""The batches that are measured first. Not one: layers may refuse it (BatchNorm), and TorchDynamo makes it a special case."""
_ROUNDS = 4
"""Batches that are measured because they may be best, at most. A guess: times vary from one to the next."""
_SLACK = 4 * 512
"""Bytes for each stage by which rounding may bend the line of a size on CUDA, where blocks have multiples of 512 bytes. A
guess: four blocks that grow."""
MOST = 2**16
"""The largest batch that is asked about, unless another is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch(BatchChoice):
    """A batch that was chosen, with the model planned for it and ready to be trained: `network`."""

    network: Checkpointable


def largest_batch(
    model: nn.Module,
    sample_of: Callable[[int], Any],
    mem_limit: float | str | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    fresh_grads: bool = False,
    multiple: int = 1,
    effective_batch: int | None = None,
    most: int = MOST,
    progress: Progress | None = None,
    **options: Any,
) -> PlannedBatch:
    """The largest batch with which a step of `model` stays inside `mem_limit`, recomputation included; exact.

    Batches are measured stage by stage, so none is tried that runs out of memory, and it works with several processes, all
    of which take the same batch. At last, one real step is taken. Parameters, gradients, the optimizer's state, buffers and
    the random state are put back.

    Args:
        model: any model that `Checkpointable` takes.
        sample_of: a function of a number of samples that returns a sample of so many, on the model's device: a tensor, a
            tuple of positional or a dict of keyword arguments.
        mem_limit: the peak of a whole step: bytes, or a text such as "4GB", "512MiB", "80%". None is 90 % of what the device
            can give this process.
        loss: a function of the output, for any batch. Without it, the model's own loss, or else a mean of squares.
        optimizer: the optimizer. Its state counts as memory, its step as time.
        fresh_grads: gradients are freed between steps.
        multiple: only batches that are multiples of it.
        effective_batch: the samples in a step of the optimizer, over several batches: only batches that divide it. Gradients
            are then kept between batches, so `fresh_grads` is refused.
        most: the largest batch that is asked about.
        progress: called with (stages done, all stages, name of the next) while measuring.
        options: other options of `Checkpointable`, without those that plan by hand, compile or read a plan.

    Raises:
        InfeasibleError: not even the smallest batch fits; `min_bytes` is what it needs.
        ValueError: a number or an option that cannot be.
        UnsupportedModelError: the model cannot be planned, or its costs do not grow with the batch.
    """
    rate_and_memory = {"loss": loss, "optimizer": optimizer, "fresh_grads": fresh_grads, "progress": progress}
    return _choose(
        "max", model, sample_of, mem_limit, _candidates(multiple, effective_batch, most, fresh_grads=fresh_grads),
        effective_batch, **rate_and_memory, **options,
    )  # fmt: skip


def best_batch(
    model: nn.Module,
    sample_of: Callable[[int], Any],
    mem_limit: float | str | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    fresh_grads: bool = False,
    multiple: int = 1,
    effective_batch: int | None = None,
    most: int = MOST,
    progress: Progress | None = None,
    **options: Any,
) -> PlannedBatch:
    """The batch with the most samples a second inside `mem_limit`, recomputation and the optimizer's step included.

    Arguments and errors are those of `largest_batch`. `gap` of the result is a certificate: for the measured costs, no batch
    has more samples a second by more than that share.
    """
    rate_and_memory = {"loss": loss, "optimizer": optimizer, "fresh_grads": fresh_grads, "progress": progress}
    return _choose(
        "best", model, sample_of, mem_limit, _candidates(multiple, effective_batch, most, fresh_grads=fresh_grads),
        effective_batch, **rate_and_memory, **options,
    )  # fmt: skip


def _candidates(multiple: int, effective_batch: int | None, most: int, *, fresh_grads: bool) -> Sequence[int]:
    """The batches to choose from, in order. ValueError for numbers that leave none."""
    for name, number in (("multiple", multiple), ("effective_batch", effective_batch), ("most", most)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} is {number!r}; it has to be a whole number, one at least")
    if effective_batch is None:
        if multiple > most:
            raise ValueError(f"multiple is {multiple} and most is {most}, so there is no batch to choose")
        return range(multiple, most + 1, multiple)
    if fresh_grads:
        raise ValueError(
            "fresh_grads=True frees gradients between batches, and effective_batch adds them up over several; leave "
            "one of them out"
        )
    found = [b for b in range(multiple, min(most, effective_batch) + 1, multiple) if effective_batch % b == 0]
    if not found:
        raise ValueError(
            f"no multiple of {multiple} up to {most} divides effective_batch, which is {effective_batch}; batches of one "
            "size could not make it"
        )
    return found


def _choose(
    aim: Aim,
    model: nn.Module,
    sample_of: Callable[[int], Any],
    mem_limit: float | str | None,
    candidates: Sequence[int],
    effective_batch: int | None,
    **options: Any,
) -> PlannedBatch:
    for name in ("compile", "level", "every_n_layers", "max_checkpoints", "plan", "custom_input"):
        if options.pop(name, None) not in (None, False):
            raise ValueError(f"{name}= is not for choosing a batch; choose one without it, then plan for that batch")
    batches = MeasuredBatches(model, sample_of, mem_limit, **options)
    for probe in _PROBES:
        batches.of(probe)
    rate: Rate | None = None
    refused: Largest | None = None
    while True:
        chooser = _Chooser(batches, batches.mem_limit, candidates, options.get("mem_slots", 500))
        fits, stored = chooser.largest(stored=False), chooser.largest(stored=True)
        if fits is None:
            raise chooser.infeasible()
        if rate is None:  # not before it is known that a batch fits, and so does the optimizer's step
            rate = Rate(batches.optimizer_seconds, effective_batch)
        fits = (
            fits
            if refused is None
            else replace(fits, beyond=refused.batch, beyond_bytes=refused.needs, beyond_measured=True)
        )
        found = None if aim == "max" else chooser.best(rate, fits.batch)
        batch = fits.batch if found is None else found.batch
        peak = batches.step_peak(batch)
        if peak is None or peak <= chooser.mem_limit:
            return _planned(aim, chooser, rate, batch, fits, stored, found, peak)
        _log.warning(
            "a step of %d samples has a peak of %d bytes, beyond the limit of %d: looking for smaller batches",
            batch, peak, chooser.mem_limit,
        )  # fmt: skip
        refused = Largest(batch, peak)
        candidates = candidates[: candidates.index(batch)]
        if not candidates:
            raise chooser.infeasible()


@dataclass(frozen=True, slots=True)
class _Chooser:
    """What can be chosen among `candidates` within `mem_limit` bytes."""

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
        return largest(self.candidates, needs, known, self.mem_limit, _SLACK * stages if self.batches.on_cuda else 0)

    def infeasible(self) -> InfeasibleError:
        """The error where not even the smallest candidate fits."""
        batch = self.candidates[0] if self.candidates else 1
        costs = CostLaw(self.batches.costs).of(batch)
        assert costs is not None
        least = costs.least_bytes
        return InfeasibleError(
            f"not even a batch of {batch} fits: it needs at least {format_bytes(least)} ({least} bytes), of which "
            f"{costs.budget.split()}; the limit is {format_bytes(self.mem_limit)} ({self.mem_limit} bytes). Try a limit of "
            f"{limit_text(least)}.",
            min_bytes=least,
            mem_limit=self.mem_limit,
        )

    def search(self, rate: Rate) -> Search:
        return Search(CostLaw(self.batches.costs), self.mem_limit, rate, self.slots)

    def best(self, rate: Rate, most: int) -> Found:
        """The best candidate up to `most`, measured; its bound is that of the last search."""
        candidates = [batch for batch in self.candidates if batch <= most]
        for _ in range(_ROUNDS):
            search = self.search(rate)
            found = search.best(candidates)
            measured = min((b for b in self.batches.costs if b in candidates), key=search.per_sample)
            # What is measured is preferred to what is no better than two plans may differ.
            if search.per_sample(measured) <= found.seconds_per_sample * (1 + TOLERANCE):
                return replace(found, batch=measured, seconds_per_sample=search.per_sample(measured))
            if not self._measured(found.batch):
                candidates.remove(found.batch)
        search = self.search(rate)
        measured = min((b for b in self.batches.costs if b in candidates), key=search.per_sample)
        return Found(measured, search.per_sample(measured), search.best(candidates).bound)

    def _measured(self, batch: int) -> bool:
        """Measure a batch; False if it is one sample, and the model refuses that."""
        try:
            self.batches.of(batch)
        except Exception:
            if batch > 1:
                raise
            _log.info("the model does not train on one sample", exc_info=True)
            return False
        return True


def _planned(
    aim: Aim,
    chooser: _Chooser,
    rate: Rate,
    batch: int,
    fits: Largest,
    stored: Largest | None,
    found: Found | None,
    peak: int | None,
) -> PlannedBatch:
    search = chooser.search(rate)
    costs = chooser.batches.of(batch)
    per_sample = search.per_sample(batch)
    return PlannedBatch(
        aim=aim,
        batch=batch,
        mem_limit=chooser.mem_limit,
        step_seconds=search.seconds(batch),
        optimizer_seconds=rate.optimizer_seconds,
        overhead=search.seconds(batch) / costs.stored_seconds if costs.stored_seconds else 1.0,
        samples_per_second=1 / per_sample,
        largest=fits.batch,
        largest_stored=None if stored is None else stored.batch,
        points=curve(search, chooser.candidates, fits.batch, {batch, *((stored.batch,) if stored else ())}),
        gap=None if found is None else max(0.0, per_sample / found.bound - 1),
        beyond=fits.beyond,
        beyond_bytes=fits.beyond_bytes,
        beyond_measured=fits.beyond_measured,
        effective_batch=rate.effective_batch,
        measured_peak_bytes=peak,
        network=chooser.batches.network(batch),
    )
