"""Where in a chain a stage is, as far as measuring it depends on that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotor_profiling.stage.gradients import Layouts
from rotor_profiling.stage.stepping import Stepped


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a chain a stage is.

    `input_bytes` is |a_i| as the chain counts it. `owned` are the addresses of storages that belong to the caller
    (parameters, the batch) and not to the stage. Unless `fresh_gradients`, parameters already have a gradient when the
    backward runs, as they do if gradients are kept between steps. `output_held` says that the caller keeps the output
    until the backward is done, which is so for the last stage. `carried` are the positions, among the output's tensors,
    of those that are kept beside the chain: they count neither as |a_{i+1}| nor as saved, only as in memory while the
    stage runs. `silent` are the positions of those that get no gradient although they could. `arriving` are the layouts
    of the gradients that the backward is given for the output's tensors. `stepped` says which parameters the backward
    steps.
    """

    device: torch.device
    input_bytes: int
    owned: Sequence[int] = ()
    fresh_gradients: bool = False
    output_held: bool = False
    carried: Sequence[int] = ()
    silent: Sequence[int] = ()
    arriving: Layouts = ()
    stepped: Stepped = ()
