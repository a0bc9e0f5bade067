"""All limits of a model at once, and the least of them: what `--sweep` and `--max-overhead` answer, from Python."""

from __future__ import annotations

from typing import Any

from torch import nn

from rotor_py.report.sweep import Sweep
from rotor_py.report.sweeping import sweep_of
from rotor_py.trials.comparison import leanest_of_each
from rotor_py.trials.measured import measured


def sweep(model: nn.Module, sample: Any = None, *, slots: int = 500, **options: Any) -> Sweep:
    """What every limit costs: the curve of time against memory, and other strategies beside it.

    Args:
        model: any model that `Checkpointable` takes, which is then measured on `sample` and not changed; or a
            `Checkpointable`, for the plan in use.
        sample: a tensor, a tuple of positional or a dict of keyword arguments. Not for a `Checkpointable`.
        slots: how finely the solver divides memory.
        options: those of `Checkpointable`: `loss`, `optimizer`, `fresh_grads`, and the others.

    Raises:
        ValueError: there is no sample, or a `Checkpointable` has not been measured or is given options.
        UnsupportedModelError: the model cannot be planned.
    """
    network = measured(model, sample, options)
    facts = network.report()
    return sweep_of(facts, slots, leanest_of_each(facts, network.model, slots))


def least_limit(
    model: nn.Module, sample: Any = None, *, max_overhead: float | None = None, slots: int = 500, **options: Any
) -> int:
    """The least limit of a whole step, in bytes, that has a plan.

    With `max_overhead`, the least whose plan costs at most so much more time than storing everything: 0.1 for a tenth.
    Arguments and errors are those of `sweep`.
    """
    facts = measured(model, sample, options, closely=max_overhead is not None).report()
    if max_overhead is None:
        return facts.budget.least_bytes()
    return sweep_of(facts, slots, overhead=max_overhead).least_for(max_overhead).mem_limit
