"""Chains of stages with their costs in seconds and bytes. `Chain` checks all costs when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rotor_solver.described_error import InvalidValueError, check_type, is_number, listed

LARGEST_SIZE = 2**50  # Bytes. `Chain` refuses larger sizes, so that sums of 8,000 sizes fit in 64-bit integers.
_LONGEST_TIME = 1e100  # Seconds. `Chain` refuses longer times, so that no sum of times is infinite.


@dataclass(frozen=True, slots=True)
class Option:
    """Costs of a stage's forward and backward in one storage mode, which says what tensors its autograd graph keeps.

    Times are seconds, sizes bytes. The graph keeps `saved` bytes from forward to backward: the stage's output is part
    of them, its input is not. `forward_temp` and `backward_temp` are scratch memory beyond the kept bytes, the input,
    and the gradients of output and input. After a recomputed forward, the backward's scratch memory is `replay_temp`
    (default: `backward_temp`).

    The graph also keeps `moved` bytes, which are not part of `saved`. A plan may offload these bytes to host memory
    after the forward, and fetch them before the backward (`rotor_solver.offload`).
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
        """Bytes that the graph keeps when the forward ends and when the backward begins: `saved` plus `moved`."""
        return self.saved + self.moved

    @property
    def backward_temp_of_replay(self) -> int:
        """Scratch bytes of a backward whose forward was a recomputation, after the loss."""
        return self.backward_temp if self.replay_temp is None else self.replay_temp


@dataclass(frozen=True, slots=True)
class Stage:
    """Costs of one stage: `activation` is the bytes of its output; `options` has the costs of each storage mode.

    `nograd_time` and `nograd_temp` are seconds and scratch bytes of a forward without a graph; they default to those of
    the first option's forward. `gradient` is the bytes that the stage's backward adds until the end of the step: its
    parameters' gradients. It is negative if the backward frees memory that a later stage's backward added.

    `input_released` and `output_released` are bytes of its input and of its output that its backward does not read.
    They are freed after a forward with a graph, unless another stage needs them.

    A forward computes no output if the stage's own backward follows at once, as nothing would read the output. That
    saves `skipped_output_time` seconds, which must not exceed the seconds of any of the stage's forwards.
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
        """Scratch bytes of a forward without a graph."""
        return self.options[0].forward_temp if self.nograd_temp is None else self.nograd_temp

    @property
    def fastest_option(self) -> int:
        """Index of the option with the least forward plus backward time; of several, the one with fewest kept bytes."""
        options = self.options
        return min(
            range(len(options)), key=lambda k: (options[k].forward_time + options[k].backward_time, options[k].kept)
        )


def checked_stage(stage: Stage, where: str, incoming: int) -> Stage:
    """Return the stage with sizes as ints, times as floats. Raises ValueError, naming `where`, if a cost is invalid."""
    given = listed(stage.options, f"options of {where}")
    if not given:
        raise InvalidValueError(f"{where} must have at least one option", kind="no_options", name=where)
    options = tuple(_checked_option(option, where, incoming) for option in given)
    activation = checked_size(stage.activation, f"activation of {where}")
    nograd_time = None if stage.nograd_time is None else checked_seconds(stage.nograd_time, f"nograd_time of {where}")
    skipped_output_time = checked_seconds(stage.skipped_output_time, f"skipped_output_time of {where}")
    for forward in (*(option.forward_time for option in options), *([] if nograd_time is None else [nograd_time])):
        if skipped_output_time > forward:
            message = f"skipped_output_time of {where} must be ≤ {forward} s, its forward, got {skipped_output_time}"
            raise InvalidValueError(message, kind="longer_than_forward", name=where)
    spared = min(activation, *(option.saved for option in options))
    return replace(
        stage,
        activation=activation,
        options=options,
        nograd_time=nograd_time,
        nograd_temp=None if stage.nograd_temp is None else checked_size(stage.nograd_temp, f"nograd_temp of {where}"),
        gradient=checked_size(stage.gradient, f"gradient of {where}", least=-LARGEST_SIZE),
        input_released=checked_size(stage.input_released, f"input_released of {where}", most=incoming),
        output_released=checked_size(stage.output_released, f"output_released of {where}", most=spared),
        skipped_output_time=skipped_output_time,
    )


def _checked_option(option: Option, where: str, incoming: int) -> Option:
    check_type(option, Option, f"option of {where}", "pass Option(forward_time, backward_time, saved)")
    replay = option.replay_temp
    return replace(
        option,
        forward_time=checked_seconds(option.forward_time, f"forward_time of {where}"),
        backward_time=checked_seconds(option.backward_time, f"backward_time of {where}"),
        saved=checked_size(option.saved, f"saved of {where}"),
        forward_temp=checked_size(option.forward_temp, f"forward_temp of {where}"),
        # `backward_temp` is negative if saved tensors are freed before the gradient of the input is allocated.
        backward_temp=checked_size(option.backward_temp, f"backward_temp of {where}", least=-incoming),
        moved=checked_size(option.moved, f"moved of {where}"),
        replay_temp=None if replay is None else checked_size(replay, f"replay_temp of {where}", least=-incoming),
    )


def checked_seconds(value: Any, what: str) -> float:
    """Return `value` as a float. Raises ValueError, naming `what`, unless it is finite and at least 0."""
    if not is_number(value) or not 0 <= value <= _LONGEST_TIME:
        raise InvalidValueError(f"{what} must be finite seconds ≥ 0, got {value!r}", kind="not_seconds", name=what)
    return float(value)


def checked_size(value: Any, what: str, least: int = 0, most: int = LARGEST_SIZE) -> int:
    """Return `value` as an int. Raises ValueError, naming `what`, unless it is an integer from `least` to `most`."""
    if not is_number(value) or not -math.inf < value < math.inf or value != int(value):
        raise InvalidValueError(f"{what} must be whole bytes, got {value!r}", kind="not_bytes", name=what)
    if not least <= value <= most:
        message = f"{what} must be {least} to {most} bytes, got {value!r}"
        raise InvalidValueError(message, kind="out_of_range", name=what, got=value, least=least, most=most)
    return int(value)


def check_chain(chain: Any) -> None:
    check_type(chain, Chain, "chain", "build one by Chain.from_arrays(…)")


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages 0 … L-1 in the order in which they run, and the loss, which counts as stage L.

    `input_bytes` is the size of the chain's input. `loss_time` covers the loss's forward and backward. `output_held`
    tells whether the caller keeps the chain's output to the end of the step. Sizes are whole numbers of bytes (integral
    floats and NumPy scalars are converted).

    Raises ValueError, naming the field and the stage, for an invalid size or time, for a stage without options, and
    for a negative `gradient` that frees more than the backwards of later stages added.
    """

    stages: tuple[Stage, ...]
    input_bytes: int
    loss_time: float = 0.0
    loss_temp: int = 0
    output_held: bool = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the class is frozen
        set_field(self, "input_bytes", checked_size(self.input_bytes, "input_bytes"))
        set_field(self, "loss_time", checked_seconds(self.loss_time, "loss_time"))
        set_field(self, "loss_temp", checked_size(self.loss_temp, "loss_temp"))
        check_type(self.output_held, bool, "output_held", "pass True or False")
        stages: list[Stage] = []
        for index, stage in enumerate(listed(self.stages, "stages")):
            check_type(stage, Stage, f"stage {index}", "pass Stage(activation, (Option(…), …))")
            incoming = stages[-1].activation if stages else self.input_bytes
            stages.append(checked_stage(stage, f"stage {index}" + (f" ({stage.name})" if stage.name else ""), incoming))
        left = 0  # Bytes that the backwards of stages `index` … L-1 add
        for index in range(len(stages) - 1, -1, -1):
            left += stages[index].gradient
            if left < 0:
                message = f"gradient of stage {index} frees {-left} bytes more than backwards of later stages added"
                raise InvalidValueError(message, kind="gradient_frees_too_much", stage=index)
        set_field(self, "stages", tuple(stages))

    @classmethod
    def from_arrays(
        cls,
        forward_time: Iterable[Any],
        backward_time: Iterable[Any],
        activation: Iterable[Any],
        saved: Iterable[Any],
        forward_temp: Iterable[Any],
        backward_temp: Iterable[Any],
        *,
        gradient: Iterable[Any] | None = None,
        nograd_time: Iterable[Any] | None = None,
        nograd_temp: Iterable[Any] | None = None,
        replay_temp: Iterable[Any] | None = None,
        input_released: Iterable[Any] | None = None,
        output_released: Iterable[Any] | None = None,
        skipped_output_time: Iterable[Any] | None = None,
        output_held: bool = False,
        names: Iterable[str] | None = None,
    ) -> Chain:
        """Build a chain of L stages with one option each, from lists of seconds and bytes.

        Three lists have L+1 entries: activation[i] is the bytes of stage i's input, activation[L] those of the chain's
        output, and the last entries of `backward_time` and `backward_temp` are the loss's. All other lists have L
        entries; saved[i] is the bytes that stage i keeps for its backward, its output included. Raises ValueError if a
        list has another length, or for values that `Chain` refuses.
        """
        forward = listed(forward_time, "forward_time")
        length = len(forward)

        def column(values: Iterable[Any] | None, name: str, *, extra: int = 0, default: Any = None) -> list[Any]:
            entries = [default] * (length + extra) if values is None else listed(values, name)
            if len(entries) != length + extra:
                needs, got = length + extra, len(entries)
                message = f"{name} must have {needs} entries for {length} forward times, got {got}"
                raise InvalidValueError(message, kind="wrong_length", name=name, got=got, needs=needs)
            return entries

        backward = column(backward_time, "backward_time", extra=1)
        backward_temps = column(backward_temp, "backward_temp", extra=1)
        sizes = column(activation, "activation", extra=1)
        options = [
            (Option(*costs),)
            for costs in zip(
                forward,
                backward[:-1],
                column(saved, "saved"),
                column(forward_temp, "forward_temp"),
                backward_temps[:-1],
                column(replay_temp, "replay_temp"),
                strict=True,
            )
        ]
        stages = map(
            Stage,
            sizes[1:],
            options,
            column(nograd_time, "nograd_time"),
            column(nograd_temp, "nograd_temp"),
            column(gradient, "gradient", default=0),
            column(names, "names", default=""),
            column(input_released, "input_released", default=0),
            column(output_released, "output_released", default=0),
            column(skipped_output_time, "skipped_output_time", default=0.0),
        )
        return cls(tuple(stages), sizes[0], backward[-1], backward_temps[-1], output_held)

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    @property
    def activation(self) -> tuple[int, ...]:
        """Bytes of every stage's input, then of the chain's output: L+1 entries."""
        return (self.input_bytes, *(stage.activation for stage in self.stages))

    @property
    def forward_time(self) -> tuple[float, ...]:
        """Forward seconds of every stage's first option."""
        return tuple(option.forward_time for option in self._first_options())

    @property
    def backward_time(self) -> tuple[float, ...]:
        """Backward seconds of every stage's first option, then of the loss: L+1 entries."""
        return (*(option.backward_time for option in self._first_options()), self.loss_time)

    @property
    def saved(self) -> tuple[int, ...]:
        """Bytes that every stage's first option keeps for its backward."""
        return tuple(option.kept for option in self._first_options())

    @property
    def forward_temp(self) -> tuple[int, ...]:
        """Scratch bytes of the forward of every stage's first option."""
        return tuple(option.forward_temp for option in self._first_options())

    @property
    def backward_temp(self) -> tuple[int, ...]:
        """Scratch bytes of the backward of every stage's first option, then of the loss: L+1 entries."""
        return (*(option.backward_temp for option in self._first_options()), self.loss_temp)

    @property
    def replay_temp(self) -> tuple[int, ...]:
        """Scratch bytes of the backward of every stage's first option if its forward was a recomputation."""
        return tuple(option.backward_temp_of_replay for option in self._first_options())

    @property
    def nograd_time(self) -> tuple[float, ...]:
        """Seconds of every stage's forward without a graph."""
        return tuple(stage.seconds_without_graph for stage in self.stages)

    @property
    def nograd_temp(self) -> tuple[int, ...]:
        """Scratch bytes of every stage's forward without a graph."""
        return tuple(stage.temp_without_graph for stage in self.stages)

    @property
    def gradient(self) -> tuple[int, ...]:
        """Bytes that every stage's backward adds until the end of the step: its parameters' gradients."""
        return tuple(stage.gradient for stage in self.stages)

    @property
    def skipped_output_time(self) -> tuple[float, ...]:
        """Seconds that every stage's forward saves by not computing its output, right before the stage's backward."""
        return tuple(stage.skipped_output_time for stage in self.stages)

    @property
    def released(self) -> tuple[tuple[int, int], ...]:
        """Bytes of every stage's input a_i that are freed after its forward with a graph, in two cases.

        The first number is for an a_i that is stored by itself. The second is for an a_i that is part of the ā_i saved
        by the previous stage: then only bytes that the backward of neither stage reads are freed.
        """
        found = [(0, 0)] if self.stages else []  # a_0 belongs to the caller, who may keep it
        for before, stage in zip(self.stages, self.stages[1:], strict=False):
            # Only the numbers of unread bytes are known: assume the least possible overlap of the two stages' bytes.
            inside = max(0, stage.input_released + before.output_released - before.activation)
            found.append((stage.input_released, inside))
        return tuple(found)

    def _first_options(self) -> Iterator[Option]:
        return (stage.options[0] for stage in self.stages)
