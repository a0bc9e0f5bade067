"""Errors whose messages tell a user what to do: RuntimeErrors for failures inside a step, else mostly ValueErrors."""

from __future__ import annotations

from rotor_solver.described_error import (
    DescribedError,
    Field,
    InfeasibleError,
    InvalidStateError,
    InvalidTypeError,
    InvalidValueError,
)

__all__ = ["DescribedError", "Field", "InfeasibleError", "InvalidStateError", "InvalidTypeError", "InvalidValueError"]

_LONGEST = 240


class DescribedWarning(DescribedError, UserWarning):  # noqa: N818
    """A warning with the attributes `kind`, `stage`, `name` and `numbers`, as `DescribedError` has them."""


def record_fields(
    kind: str, *, stage: int | None = None, name: str | None = None, **numbers: Field
) -> dict[str, object]:
    """Return the attributes `kind`, `stage`, `subject` and `numbers` of a log record, as a dict to pass as `extra`.

    `subject` has the value that a `DescribedError` has as `name`: a log record's own `name` is that of its logger.
    """
    return {"kind": kind, "stage": stage, "subject": name, "numbers": numbers}


def kind_of(error: BaseException) -> str:
    return error.kind if isinstance(error, DescribedError) else type(error).__name__


def fields_of(error: BaseException) -> dict[str, object]:
    if not isinstance(error, DescribedError):
        return record_fields(kind_of(error))
    return record_fields(error.kind, stage=error.stage, name=error.name, **error.numbers)


class UnsupportedModelError(DescribedError, ValueError):
    """No plan can be made for this model or input unless the user changes it."""

    kind = "unsupported_model"


class PlanMismatchError(DescribedError, ValueError):
    """The plan was made for another model, input or setting: `field` was `planned` then and is `found` now."""

    kind = "plan_for_other_model"

    def __init__(self, field: str, planned: object, found: object) -> None:
        super().__init__(
            f"the plan was made for another model or input: {shortened(field)} was {shortened(planned)} then and is "
            f"{shortened(found)} now; save a new plan (save_plan, rotor-plan --save), or let Checkpointable make one",
            name=field,
        )
        self.field = field
        self.planned = planned
        self.found = found


class OtherDataError(PlanMismatchError):
    """For this batch, the model takes other branches than for the planned one; only one of them has padding, say.

    `answers` holds the results of the model's conditions on data for this batch, in the order of capture.
    """

    def __init__(self, planned: tuple[bool, ...], found: tuple[bool, ...]) -> None:
        texts = [", ".join("yes" if each else "no" for each in given) or "nothing" for given in (planned, found)]
        super().__init__("what the model asks about its data", *texts)
        self.answers = found


def shortened(value: object) -> str:
    """Return `str(value)` on one line, shortened in the middle if long."""
    text = str(value)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return text if text.isprintable() else repr(text)[1:-1]


class StageChangedError(InvalidStateError):
    """A stage cannot be recomputed exactly, because a value that it reads was changed after its forward.

    `what` names the value, which changed from `was` to `now`. Plans of later steps store the stage `name`.
    """

    def __init__(self, name: str, what: str, was: object, now: object) -> None:
        super().__init__(
            f"{shortened(what)} of stage {name!r} was {shortened(was)} in the forward and is {shortened(now)} now, so "
            "the backward cannot recompute the stage; change it only before the forward or after the backward "
            "(optimizer.step() too). From the next step on, the plan stores this stage",
            kind="stage_changed",
            name=name,
        )
        self.what, self.was, self.now = what, was, now


class OffloadError(DescribedError, RuntimeError):
    """An activation cannot be copied to the offload tier or back, for example because the disk is full."""

    kind = "cannot_offload"


class CheckpointLimitError(DescribedError, ValueError):
    """A checkpoint of `layer` would exceed the `max_checkpoints` of an `ActivationCheckpointer`."""

    kind = "too_many_checkpoints"

    def __init__(self, layer: int, max_checkpoints: int) -> None:
        super().__init__(
            f"layer {layer} would be checkpoint {max_checkpoints + 1}, and max_checkpoints is {max_checkpoints}; raise "
            "max_checkpoints, keep every n-th layer for a larger n, or call clear() first",
            layer=layer,
            max_checkpoints=max_checkpoints,
        )
        self.layer = layer
        self.max_checkpoints = max_checkpoints


class MissingCheckpointError(DescribedError, ValueError):
    """`layer` cannot be recomputed: neither a checkpoint at or before it nor the network's input is stored."""

    kind = "no_checkpoint"

    def __init__(self, layer: int) -> None:
        super().__init__(
            f"layer {layer} cannot be recomputed: neither a checkpoint at or before it nor the network's input is "
            "stored; run checkpointed_forward first, or save a checkpoint at or before this layer",
            layer=layer,
        )
        self.layer = layer


def what_it_is(value: object) -> str:
    """Return "the class X itself" for a class X, and the name of its class for any other value, for error messages."""
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__
