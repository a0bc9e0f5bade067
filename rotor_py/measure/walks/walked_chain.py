"""The stages of a chain as every walk runs them: one after the other, each on what the one before it made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rotor_profiling import isolated, leaves_of
from rotor_py.measure.cut import Cut
from rotor_py.measure.walks.layer_offers import LayerOffers
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.ways.keeper import Keeper


@dataclass(frozen=True, slots=True)
class WalkedChain:
    """The stages of `cut` on their `device`, and the `value` that goes into the first of them.

    `silent` are the positions, among the tensors of the chain's output, of those that get no gradient. The processes of
    `group` walk through the same stages together.
    """

    cut: Cut
    value: Any
    device: torch.device
    silent: tuple[int, ...]
    group: dist.ProcessGroup | None
    preserve_rng_state: bool
    keepers: tuple[Keeper, ...]
    layer_offers: LayerOffers | None
    """What finds ways to store layers beside those that they say themselves."""

    def runner(self, number: int, ways: Sequence[str] = ()) -> StageRunner:
        """What runs the stage with this number as training does, stored whole or in one of these `ways`."""
        name, function = self.cut.stages[number]
        offers = None if self.layer_offers is None else self.layer_offers.of(function)
        return StageRunner(function, name, self.preserve_rng_state, ways=ways, keepers=self.keepers, offers=offers)

    def run(self, runner: StageRunner, value: Any) -> Any:
        """The input of the following stage, with `requires_grad` where training has it."""
        with isolated(runner.function, self.device), torch.enable_grad():
            return leaves_of(runner.forward(leaves_of(value)))

    def run_without_graph(self, runner: StageRunner, value: Any) -> Any:
        """The output of a stage for which no graph was made: its numbers may be those of another kernel."""
        with isolated(runner.function, self.device), torch.no_grad():
            return runner.forward(value)

    def silent_of(self, number: int) -> tuple[int, ...]:
        """The positions of the outputs of the stage with this number that get no gradient."""
        return self.silent if number == len(self.cut.stages) - 1 else ()
