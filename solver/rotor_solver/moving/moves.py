"""When what stages keep is copied out of memory and back, by the operations of a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moves:
    """What is waited for, and what begins, right before every operation of a sequence. # Note [Moves]

    1. A stage moves if it is in `fetch`. Then its forward before the loss has an option with `moved` bytes. The copy
       out begins as soon as that forward ends. A stage that is not in `fetch` keeps these bytes in memory, and so does
       every forward after the loss, whatever its option.
    2. Copies of one direction follow one another in the order in which they begin. The directions do not wait for each
       other.
    3. `wait_out[position]` are the stages whose copy out has to be over before the operation begins. Every stage that
       moves is in it once, at the first operation after the loss at the latest: nothing goes out later.
    4. `fetch[position]` are the stages whose copy back begins right before the operation, in this order, after the
       waits of this operation; always after the loss. The bytes count from here on, even if other copies come first.
    5. The backward of a stage waits for its copy back.

    So the most that is in memory depends on the waits alone, and the speed of the link decides nothing but the time.
    """

    wait_out: tuple[tuple[int, ...], ...]
    fetch: tuple[tuple[int, ...], ...]

    @classmethod
    def none(cls, operations: int) -> Moves:
        """Of a sequence of so many operations, nothing moves."""
        return cls(((),) * operations, ((),) * operations)

    @property
    def stages(self) -> frozenset[int]:
        """The stages that move."""
        return frozenset(stage for stages in self.fetch for stage in stages)
