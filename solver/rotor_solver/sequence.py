"""Operations of a training step, sequences of them, and the copies by which a sequence offloads (`Moves`).

The notation follows Beaumont et al., "Optimal checkpointing for heterogeneous chains" (HAL hal-02352969). A sequence
is written `Fe_0, CF_1, Fn_2, Fe_3, L, B_3, …`.
"""

from __future__ import annotations

import collections.abc
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, overload

from rotor_solver.described_error import InvalidValueError, check_count, check_type, is_number, listed


@dataclass(frozen=True, slots=True)
class ForwardEnable:
    """Run stage `stage` forward with a graph, in storage mode `option`, and keep everything that its backward needs."""

    stage: int
    option: int = 0

    def __str__(self) -> str:
        return f"Fe_{self.stage}^{self.option}" if self.option else f"Fe_{self.stage}"


@dataclass(frozen=True, slots=True)
class ForwardCheck:
    """Run stage `stage` forward without a graph, and keep its input as a checkpoint."""

    stage: int

    def __str__(self) -> str:
        return f"CF_{self.stage}"


@dataclass(frozen=True, slots=True)
class ForwardNograd:
    """Run stage `stage` forward without a graph, and free its input."""

    stage: int

    def __str__(self) -> str:
        return f"Fn_{self.stage}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Compute the loss from the chain's output, and the gradient of the loss with respect to that output."""

    def __str__(self) -> str:
        return "L"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run stage `stage` backward, from the gradient of its output to the gradient of its input."""

    stage: int

    def __str__(self) -> str:
        return f"B_{self.stage}"


Operation = ForwardEnable | ForwardCheck | ForwardNograd | Loss | Backward


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies of offloading: those to wait for before each operation, and those back to begin then. # Note [Moves]

    1. A stage moves (is offloaded) if it is in `fetch`. Its forward before the loss must use an option with `moved`
       bytes, and the copy out begins as soon as that forward ends. A stage that is not in `fetch` keeps these bytes in
       memory, and so does every forward after the loss, whatever its option.
    2. Copies of one direction run one after another, in the order in which they begin. Copies of the two directions run
       at the same time.
    3. `wait_out[position]` are the stages whose copy out must be over before the operation begins. Every stage that
       moves is listed once, no later than at the first operation after the loss. So all copies out are over then.
    4. `fetch[position]` are the stages whose copy back begins right before the operation, in this order, after its
       waits; always after the loss. The stage's bytes count from then on, even while its copy is queued behind others.
    5. The backward of a stage waits for its copy back.

    So the peak memory depends only on the positions of waits and fetches; the speed of copies changes only the time.
    """

    wait_out: tuple[tuple[int, ...], ...]
    fetch: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> frozenset[int]:
        """The stages that are offloaded (Rule 1)."""
        return frozenset(stage for stages in self.fetch for stage in stages)


_TOKEN = re.compile(r"(?P<kind>Fe|CF|Fn|B)_(?P<stage>[0-9]+)(\^(?P<option>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Sequence(collections.abc.Sequence[Operation]):
    """An immutable list of operations. Two sequences are equal if their operations, `beside` and `moves` are.

    `algorithm` names the algorithm that found the sequence. Within the limit that it was found for, no sequence that
    drops checkpoints only at the backward that uses them takes less than `lower_bound` seconds; None if unknown.
    `moves` has the copies of offloading, or is None. `beside` has the sequences of further forwards in flight; empty if
    all use this one. With several forwards, `lower_bound` is an equal share of the bound for all of them together.
    Raises ValueError if an item is no operation.
    """

    operations: tuple[Operation, ...]
    algorithm: str = field(default="", compare=False)
    lower_bound: float | None = field(default=None, compare=False)
    beside: tuple[Sequence, ...] = ()
    moves: Moves | None = None

    def __init__(
        self,
        operations: Iterable[Operation],
        algorithm: str = "",
        lower_bound: float | None = None,
        beside: Iterable[Sequence] = (),
        moves: Moves | None = None,
    ) -> None:
        object.__setattr__(self, "operations", tuple(listed(operations, "operations")))
        object.__setattr__(self, "beside", tuple(listed(beside, "beside")))
        object.__setattr__(self, "moves", moves)
        object.__setattr__(self, "algorithm", algorithm)
        object.__setattr__(self, "lower_bound", lower_bound)
        for each in self.beside:
            check_sequence(each, "beside")
        for position, operation in enumerate(() if isinstance(operations, Sequence) else self.operations):
            numbers = (getattr(operation, "stage", 0), getattr(operation, "option", 0))
            if not isinstance(operation, Operation) or not all(is_number(each, Integral) for each in numbers):
                message = f"item {position} must be an operation, got {operation!r}"
                raise InvalidValueError(message, kind="not_an_operation", position=position)

    @classmethod
    def parse(cls, text: str) -> Sequence:
        """Parse the text of `str(sequence)`, with or without brackets. Raises ValueError naming an invalid item."""
        check_type(text, str, "text", "pass the output of str(sequence)")
        inside = text.strip().removeprefix("[").removesuffix("]").strip()
        tokens = [token.strip() for token in inside.split(",")] if inside else []
        return cls(_operation(position, token) for position, token in enumerate(tokens))

    def of_forwards(self, forwards: int) -> tuple[Sequence, ...]:
        """Return one sequence for each of `forwards` forwards in flight: this one, then `beside`, the last repeated."""
        check_count(forwards, "forwards")
        known = (self, *self.beside)[:forwards]
        return (*known, *(known[-1:] * (forwards - len(known))))

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Operation, ...]: ...
    def __getitem__(self, index: int | slice) -> Operation | tuple[Operation, ...]:
        return self.operations[index]

    def __str__(self) -> str:
        return ", ".join(map(str, self.operations))


def check_sequence(sequence: Any, name: str = "sequence") -> None:
    check_type(sequence, Sequence, name, "build one by Sequence(operations)")


def _operation(position: int, token: str) -> Operation:
    if token == "L":
        return Loss()
    found = _TOKEN.fullmatch(token)
    if found is not None and found["kind"] == "Fe":
        return ForwardEnable(int(found["stage"]), int(found["option"] or 0))
    if found is not None and found["option"] is None:
        kinds: dict[str, Callable[[int], Operation]] = {"CF": ForwardCheck, "Fn": ForwardNograd, "B": Backward}
        return kinds[found["kind"]](int(found["stage"]))
    message = f"operation {position} must read Fe_3, Fe_3^1, CF_3, Fn_3, L or B_3, got {token!r}"
    raise InvalidValueError(message, kind="not_an_operation", position=position)
