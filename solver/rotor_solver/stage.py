"""One stage of a chain, the ways to run it, and the checks of what people say it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

LARGEST_SIZE = 2**50
"""Bytes; larger sizes are refused, so that sums of them are exact everywhere."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage forward with a graph, and then backward. Seconds and bytes.

    `saved` is what the backward needs, the stage's output included and its input not. The temporary sizes are what a
    run needs beyond its inputs and outputs. `replay_temp` takes the place of `backward_temp` if the forward was run
    after the loss; unless given, the two are equal.

    `moved` bytes more are needed by the backward, and may be copied out of memory after the forward and back before the
    backward (`rotor_solver.moving`). They are there when the forward ends and when the backward begins. Where nothing
    says that they are moved, they stay.
    """

    forward_time: float
    backward_time: float
    saved: int
    forward_temp: int = 0
    backward_temp: int = 0
    replay_temp: int | None = None
    name: str = ""
    moved: int = 0

    @property
    def kept(self) -> int:
        """Bytes that are there when the forward ends, and that have to be there when the backward begins."""
        return self.saved + self.moved

    @property
    def backward_temp_of_replay(self) -> int:
        """Temporary bytes of a backward whose forward was run after the loss."""
        return self.backward_temp if self.replay_temp is None else self.replay_temp


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: `activation` is the size of its output, `options` the ways to run it with a graph.

    `nograd_time` and `nograd_temp` are for runs without a graph; unless given, they are those of the first option's
    forward. `gradient` is what the stage's backward leaves in memory for good: the gradients of its parameters. It is
    negative if the backward frees what the backward of a later stage left.

    Once the stage has run with a graph, its backward does not need `input_released` bytes of its input, nor
    `output_released` bytes of its output. They are freed if nobody else needs them.

    `skipped_output_time` is the part of a forward with a graph that goes into the output's values alone. A run right
    before the stage's own backward skips it. It is at most the time of any forward of the stage.
    """

    activation: int
    options: tuple[Option, ...]
    nograd_time: float | None = None
    nograd_temp: int | None = None
    gradient: int = 0
    name: str = ""
    input_released: int = 0
    output_released: int = 0
    skipped_output_time: float = 0.0

    @property
    def seconds_without_graph(self) -> float:
        """Seconds of a forward without a graph."""
        return self.options[0].forward_time if self.nograd_time is None else self.nograd_time

    @property
    def temp_without_graph(self) -> int:
        """Temporary bytes of a forward without a graph."""
        return self.options[0].forward_temp if self.nograd_temp is None else self.nograd_temp

    @property
    def fastest_option(self) -> int:
        """The index of the option whose forward and backward are fastest; among equals, of one that keeps least."""
        options = self.options
        return min(
            range(len(options)), key=lambda k: (options[k].forward_time + options[k].backward_time, options[k].kept)
        )


def checked_stage(stage: Stage, where: str, incoming: int) -> Stage:
    """The stage with sizes as ints and times as floats; `incoming` are the bytes of its input.

    Raises ValueError, naming the field and `where` it is, for a size or a time that cannot be, and for no options.
    """
    if not stage.options:
        raise ValueError(f"{where} has no options; a stage needs at least one way to run")
    options = tuple(_checked_option(option, where, incoming) for option in stage.options)
    nograd_time = None if stage.nograd_time is None else checked_seconds(stage.nograd_time, f"nograd_time of {where}")
    skipped_output_time = checked_seconds(stage.skipped_output_time, f"skipped_output_time of {where}")
    for forward in (*(option.forward_time for option in options), *([] if nograd_time is None else [nograd_time])):
        if skipped_output_time > forward:
            raise ValueError(
                f"skipped_output_time of {where} is {skipped_output_time} seconds; it is a part of the forward, which "
                f"takes {forward}"
            )
    return replace(
        stage,
        activation=checked_size(stage.activation, f"activation of {where}"),
        options=options,
        nograd_time=nograd_time,
        nograd_temp=None if stage.nograd_temp is None else checked_size(stage.nograd_temp, f"nograd_temp of {where}"),
        gradient=checked_size(stage.gradient, f"gradient of {where}", least=-LARGEST_SIZE),
        input_released=checked_size(stage.input_released, f"input_released of {where}", most=incoming),
        output_released=checked_size(
            stage.output_released,
            f"output_released of {where}",
            most=min(stage.activation, *(option.saved for option in stage.options)),
        ),
        skipped_output_time=skipped_output_time,
    )


def _checked_option(option: Option, where: str, incoming: int) -> Option:
    replay = option.replay_temp
    return replace(
        option,
        forward_time=checked_seconds(option.forward_time, f"forward_time of {where}"),
        backward_time=checked_seconds(option.backward_time, f"backward_time of {where}"),
        saved=checked_size(option.saved, f"saved of {where}"),
        forward_temp=checked_size(option.forward_temp, f"forward_temp of {where}"),
        # Below zero if the output's gradient and all that is saved are never there at once.
        backward_temp=checked_size(option.backward_temp, f"backward_temp of {where}", least=-incoming),
        moved=checked_size(option.moved, f"moved of {where}"),
        replay_temp=None if replay is None else checked_size(replay, f"replay_temp of {where}", least=-incoming),
    )


def checked_seconds(value: Any, what: str) -> float:
    """`value` as a float. Raises ValueError, naming `what` it is, unless it is a finite number, zero or more."""
    number = _number(value)
    if number is None or not math.isfinite(number) or number < 0:
        raise ValueError(f"{what} is {value!r}; it has to be a finite number of seconds, zero or more")
    return float(number)


def checked_size(value: Any, what: str, least: int = 0, most: int = LARGEST_SIZE) -> int:
    """`value` as an int. Raises ValueError, naming `what` it is, unless it is a whole number from `least` to `most`."""
    number = _number(value)
    if number is None or not math.isfinite(number) or number != int(number):
        raise ValueError(f"{what} is {value!r}; it has to be a whole number of bytes")
    if not least <= number <= most:
        raise ValueError(f"{what} is {value!r}; it has to be between {least} and {most} bytes")
    return int(number)


def _number(value: Any) -> Any:
    """`value` if it is a real number, a NumPy scalar included, else None."""
    # bool is a kind of int in Python, but never meant as bytes or seconds.
    return None if isinstance(value, bool) or not isinstance(value, Real) else value
