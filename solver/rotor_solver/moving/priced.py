"""A chain in which bytes that move have a price in seconds, and no place in memory but in their own operations.

It is solved as any other chain. A sequence of it takes `seconds + price · moved bytes`. Its memory is that of the
sequence while all that moves is away whenever it can be: no timetable of copies needs less.
"""

from __future__ import annotations

from dataclasses import replace

from rotor_solver.chain import Chain
from rotor_solver.stage import LARGEST_SIZE, Option, Stage


def priced(chain: Chain, price: float) -> Chain:
    """`chain`, where every byte that an option moves takes `price` seconds more.

    What is made again after the loss does not move: no copy goes out then. So these options cannot be used there.
    """
    return replace(chain, stages=tuple(_priced_stage(stage, price) for stage in chain.stages))


def _priced_stage(stage: Stage, price: float) -> Stage:
    if not any(option.moved for option in stage.options):
        return stage
    return replace(
        stage,
        options=tuple(_priced_option(option, price) for option in stage.options),
        # Unless given, they are those of the first option, which may have a price now.
        nograd_time=stage.seconds_without_graph,
        nograd_temp=stage.temp_without_graph,
    )


def _priced_option(option: Option, price: float) -> Option:
    if not option.moved:
        return option
    return replace(
        option,
        forward_time=option.forward_time + price * option.moved,
        forward_temp=option.forward_temp + option.moved,
        backward_temp=option.backward_temp + option.moved,
        replay_temp=LARGEST_SIZE,  # of a forward after the loss: more than any limit
        moved=0,
    )
