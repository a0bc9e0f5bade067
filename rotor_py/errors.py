"""Errors that tell a user what to do: `ValueError`s, but for what fails in the middle of a step."""

from __future__ import annotations

from rotor_solver import InfeasibleError

__all__ = [
    "CheckpointLimitError",
    "InfeasibleError",
    "MissingCheckpointError",
    "OffloadError",
    "PlanMismatchError",
    "UnsupportedModelError",
]


_LONGEST = 240


class UnsupportedModelError(ValueError):
    """A model, or an input, that cannot be trained from a plan as it is."""


class PlanMismatchError(ValueError):
    """A plan that was made for something else. `field` says what differs, `planned` and `found` how."""

    def __init__(self, field: str, planned: object, found: object) -> None:
        super().__init__(
            f"the plan was made for another model or input: {shortened(field)} was {shortened(planned)} then and is "
            f"{shortened(found)} now; save a new one (save_plan, rotor-plan --save), or let Checkpointable make one"
        )
        self.field = field
        self.planned = planned
        self.found = found


class OtherDataError(PlanMismatchError):
    """A plan that was made for batches whose data the model treats otherwise: with padding or without, for example.

    `found` is how this batch answers the model's questions about data; TorchDynamo knows their order.
    """

    def __init__(self, planned: tuple[bool, ...], found: tuple[bool, ...]) -> None:
        super().__init__("what the model asks about its data", _answers(planned), _answers(found))
        self.answers = found


def shortened(value: object) -> str:
    """`str(value)` on one line, with its middle left out where it is long."""
    text = str(value)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return text if text.isprintable() else repr(text)[1:-1]


def _answers(given: tuple[bool, ...]) -> str:
    return ", ".join("yes" if each else "no" for each in given) or "nothing"


class OffloadError(RuntimeError):
    """An activation that cannot be moved to where the user wants it, or back: a full disk, for example."""


class CheckpointLimitError(ValueError):
    """One more checkpoint than an `ActivationCheckpointer` may keep: of `layer`, beside `max_checkpoints` others."""

    def __init__(self, layer: int, max_checkpoints: int) -> None:
        super().__init__(
            f"layer {layer} would be checkpoint {max_checkpoints + 1}, and max_checkpoints is {max_checkpoints}; raise "
            "it, keep every n-th layer for a larger n, or call clear() first"
        )
        self.layer = layer
        self.max_checkpoints = max_checkpoints


class MissingCheckpointError(ValueError):
    """There is no checkpoint at or before `layer`, and no input from which to compute it."""

    def __init__(self, layer: int) -> None:
        super().__init__(
            f"nothing is kept at layer {layer} or before, nor the network's input, so its output cannot be computed "
            "again; run checkpointed_forward first, or save a checkpoint before it"
        )
        self.layer = layer


def what_it_is(value: object) -> str:
    """The kind of a value that is not what was asked for, for an error."""
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__
