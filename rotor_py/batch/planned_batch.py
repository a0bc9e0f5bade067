"""The batch that was chosen, with all that a report says about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotor_py.batch.chooser import Chooser
from rotor_py.batch.curve import curve
from rotor_py.batch.largest import Largest
from rotor_py.batch.predicted.batches import NoTrial
from rotor_py.batch.real_steps import Trial
from rotor_py.batch.search import Found
from rotor_py.checkpointable import Checkpointable
from rotor_py.report.batch_choice import Aim, BatchChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch(BatchChoice):
    """A batch that was chosen, with the model planned for it and ready to be trained: `network`."""

    network: Checkpointable


def planned_batch(
    aim: Aim, chooser: Chooser, trial: Trial | NoTrial, fits: Largest, stored: Largest | None, found: Found | None
) -> PlannedBatch:
    """The batch that `trial` has turned to, among those that fit up to `fits`, everything `stored` up to that one."""
    search, batch = chooser.search(trial.rate), trial.batch
    predicted = isinstance(trial, NoTrial)
    points = curve(search, chooser.candidates, fits.batch, {batch, *((stored.batch,) if stored else ())})
    costs, per_sample = chooser.batches.of(batch), search.per_sample(batch)
    return PlannedBatch(
        aim=aim,
        batch=batch,
        mem_limit=chooser.mem_limit,
        step_seconds=search.seconds(batch),
        optimizer_seconds=trial.rate.optimizer_seconds,
        overhead=search.seconds(batch) / costs.stored_seconds if costs.stored_seconds else 1.0,
        samples_per_second=1 / per_sample,
        largest=fits.batch,
        largest_stored=None if stored is None else stored.batch,
        points=tuple(replace(each, measured=False) for each in points) if predicted else points,
        gap=None if found is None else max(0.0, per_sample / found.bound - 1),
        beyond=fits.beyond,
        beyond_bytes=fits.beyond_bytes,
        beyond_measured=fits.beyond_measured and not predicted,
        predicted=predicted,
        effective_batch=trial.rate.effective_batch,
        measured_peak_bytes=trial.peaks[batch],
        measured_per_second=tuple(sorted(trial.rates.items())),
        network=chooser.batches.network(batch),
    )
