"""The batches to choose from: all, the multiples of a number, or those of which several make an effective batch."""

from __future__ import annotations

from collections.abc import Sequence

from rotor_py.errors import InvalidValueError

MOST = 2**16
"""The largest batch that is asked about, unless another is given."""


def candidates(multiple: int, effective_batch: int | None, most: int, *, fresh_grads: bool) -> Sequence[int]:
    """The batches to choose from, which increase. ValueError for numbers that leave none."""
    for name, number in (("multiple", multiple), ("effective_batch", effective_batch), ("most", most)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise InvalidValueError(
                f"{name} is {number!r}; it has to be a whole number, one at least", kind="not_a_count", name=name
            )
    if effective_batch is None:
        if multiple > most:
            raise InvalidValueError(
                f"multiple is {multiple} and most is {most}, so there is no batch to choose",
                kind="no_batch",
                name="multiple",
                multiple=multiple,
                most=most,
            )
        return range(multiple, most + 1, multiple)
    if fresh_grads:
        raise InvalidValueError(
            "fresh_grads=True frees gradients between batches, and effective_batch adds them up over several; leave "
            "one of them out",
            kind="excluded_together",
            name="fresh_grads",
        )
    found = [b for b in range(multiple, min(most, effective_batch) + 1, multiple) if effective_batch % b == 0]
    if not found:
        raise InvalidValueError(
            f"no multiple of {multiple} up to {most} divides effective_batch, which is {effective_batch}; batches of "
            "one size could not make it",
            kind="not_divisible",
            name="effective_batch",
        )
    return found
