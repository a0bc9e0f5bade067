"""Chains of stages and what they cost, in seconds and bytes. `Chain` checks everything, once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rotor_solver.stage import Option, Stage, checked_seconds, checked_size, checked_stage


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages 0 … L-1 in the order in which they run, and the loss, which counts as stage L.

    `input_bytes` is the size of the chain's input. `loss_time` is the loss's forward and backward together.
    `output_held` says that the caller keeps the chain's output to the end of the step. Sizes are whole numbers of bytes
    (integral floats and NumPy's are converted).

    Raises ValueError, naming the field and the stage, for a size or a time that cannot be, for a stage without options,
    and for gradients that free more than later stages have left.
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
        set_field(self, "output_held", bool(self.output_held))
        stages: list[Stage] = []
        for index, stage in enumerate(self.stages):
            incoming = stages[-1].activation if stages else self.input_bytes
            stages.append(checked_stage(stage, f"stage {index}" + (f" ({stage.name})" if stage.name else ""), incoming))
        left = 0  # by the backwards, in the order in which they run
        for index in range(len(stages) - 1, -1, -1):
            left += stages[index].gradient
            if left < 0:
                raise ValueError(
                    f"gradient of stage {index} is {stages[index].gradient}; it frees {-left} bytes more than the "
                    "backwards of later stages left"
                )
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
        """A chain of L stages with one option each, from lists of seconds and bytes.

        `backward_time`, `activation` and `backward_temp` have L+1 entries: activation[i] is the size of stage i's
        input, and the last entries of the other two are the loss's. All other lists have L entries; saved[i] is what
        stage i keeps for its backward. Raises ValueError if a list has another length, or for what `Chain` refuses.
        """
        forward = list(forward_time)
        length = len(forward)

        def column(values: Iterable[Any] | None, name: str, *, extra: int = 0, default: Any = None) -> list[Any]:
            return [default] * length if values is None else _listed(values, name, length, extra)

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
        """Sizes of every stage's input, and last of the chain's output: L+1 entries."""
        return (self.input_bytes, *(stage.activation for stage in self.stages))

    @property
    def forward_time(self) -> tuple[float, ...]:
        """Forward seconds of every stage's first option."""
        return tuple(option.forward_time for option in self._first_options())

    @property
    def backward_time(self) -> tuple[float, ...]:
        """Backward seconds of every stage's first option, and last of the loss: L+1 entries."""
        return (*(option.backward_time for option in self._first_options()), self.loss_time)

    @property
    def saved(self) -> tuple[int, ...]:
        """What every stage's first option keeps for its backward."""
        return tuple(option.kept for option in self._first_options())

    @property
    def forward_temp(self) -> tuple[int, ...]:
        """Temporary memory of the forward of every stage's first option."""
        return tuple(option.forward_temp for option in self._first_options())

    @property
    def backward_temp(self) -> tuple[int, ...]:
        """Temporary memory of the backward of every stage's first option, and last of the loss: L+1 entries."""
        return (*(option.backward_temp for option in self._first_options()), self.loss_temp)

    @property
    def replay_temp(self) -> tuple[int, ...]:
        """Temporary memory of a backward whose forward was run again, for every stage's first option."""
        return tuple(option.backward_temp_of_replay for option in self._first_options())

    @property
    def nograd_time(self) -> tuple[float, ...]:
        """Seconds of a forward without a graph."""
        return tuple(stage.seconds_without_graph for stage in self.stages)

    @property
    def nograd_temp(self) -> tuple[int, ...]:
        """Temporary memory of a forward without a graph."""
        return tuple(stage.temp_without_graph for stage in self.stages)

    @property
    def gradient(self) -> tuple[int, ...]:
        """What every stage's backward leaves in memory for good."""
        return tuple(stage.gradient for stage in self.stages)

    @property
    def skipped_output_time(self) -> tuple[float, ...]:
        """Seconds that a forward right before the stage's backward saves by skipping its output."""
        return tuple(stage.skipped_output_time for stage in self.stages)

    @property
    def released(self) -> tuple[tuple[int, int], ...]:
        """For every stage, the bytes of its input that are freed once it has run with a graph: (alone, inside ā_i).

        If the input lies in the ā_i of the stage before, they are freed only if that stage does not need them either.
        """
        found = [(0, 0)] if self.stages else []  # a_0 belongs to the caller
        for before, stage in zip(self.stages, self.stages[1:], strict=False):
            # Nobody knows which bytes each of the two does without: at least so many are the same ones.
            inside = max(0, stage.input_released + before.output_released - before.activation)
            found.append((stage.input_released, inside))
        return tuple(found)

    def _first_options(self) -> Iterator[Option]:
        return (stage.options[0] for stage in self.stages)


def _listed(values: Iterable[Any], name: str, length: int, extra: int) -> list[Any]:
    listed = list(values)
    if len(listed) != length + extra:
        raise ValueError(
            f"{name} has {len(listed)} entries; a chain of {length} stages (the length of forward_time) needs "
            f"{length + extra}"
        )
    return listed
