"""What `sweep`, `least_limit`, `compare` and `verify` are about: a model and a sample, or what has been measured."""

from __future__ import annotations

from typing import Any

from torch import nn

from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import InvalidValueError


def measured(model: nn.Module, sample: Any, options: dict[str, Any], *, closely: bool = False) -> Checkpointable:
    """`model`, if it is a `Checkpointable`; else one of it, measured on `sample`, `closely` if asked.

    `options` are those of the class.

    ValueError if there is no sample, or if a `Checkpointable` is given one, or options. UnsupportedModelError if the
    model cannot be planned, InfeasibleError if a limit is among the options and no plan fits.
    """
    if isinstance(model, Checkpointable):
        if sample is not None or options:
            raise InvalidValueError(
                "a Checkpointable has been given its sample and options already; pass it alone",
                kind="sample_given_twice",
            )
        return model
    if sample is None:
        raise InvalidValueError(
            "a model has to be measured on a sample: pass one as the second argument", kind="no_sample"
        )
    if not closely:
        return Checkpointable(model, sample, **options)
    network = Checkpointable(model, **options)
    network.measure(sample, closely=True)
    return network
