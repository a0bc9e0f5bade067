"""The costs of one chain where several processes have measured it: for each number, that of who needs most.

Processes that train together wait for each other in every collective, so the slowest decides how long a stage takes. A
sequence that fits these costs fits each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rotor_solver import Chain, Option, Stage


def costliest(chains: Sequence[Chain]) -> Chain:
    """A chain whose stages cost as much as in any of `chains`, which have the same stages.

    Of the ways to run a stage, those are left that have the same name and number in all of them.
    """
    if all(chain == chains[0] for chain in chains):
        return chains[0]
    return Chain(
        tuple(_stage(same) for same in zip(*(chain.stages for chain in chains), strict=True)),
        input_bytes=max(chain.input_bytes for chain in chains),
        loss_time=max(chain.loss_time for chain in chains),
        loss_temp=max(chain.loss_temp for chain in chains),
        output_held=any(chain.output_held for chain in chains),
    )


def _stage(same: Sequence[Stage]) -> Stage:
    return Stage(
        activation=max(stage.activation for stage in same),
        options=tuple(map(_option, takewhile(_alike, zip(*(stage.options for stage in same), strict=False)))),
        nograd_time=max(stage.seconds_without_graph for stage in same),
        nograd_temp=max(stage.temp_without_graph for stage in same),
        gradient=max(stage.gradient for stage in same),
        name=same[0].name,
        # What is freed, and time that is saved: there, the least is what all can count on.
        input_released=min(stage.input_released for stage in same),
        output_released=min(stage.output_released for stage in same),
        skipped_output_time=min(stage.skipped_output_time for stage in same),
    )


def _alike(same: Sequence[Option]) -> bool:
    return len({option.name for option in same}) == 1


def _option(same: Sequence[Option]) -> Option:
    return Option(
        forward_time=max(option.forward_time for option in same),
        backward_time=max(option.backward_time for option in same),
        saved=max(option.saved for option in same),
        forward_temp=max(option.forward_temp for option in same),
        backward_temp=max(option.backward_temp for option in same),
        replay_temp=max(option.backward_temp_of_replay for option in same),
        name=same[0].name,
        moved=max(option.moved for option in same),
    )
