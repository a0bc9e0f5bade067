"""`Trainer(model, args, callbacks=[MemoryLimit("4GB")])`: run transformers' trainer within a limit."""

from __future__ import annotations

from typing import Any

from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import UnsupportedModelError
from rotor_py.integrations.in_place import InPlace

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "rotor_py's callback needs transformers, which is not installed: pip install transformers accelerate",
        name="transformers",
    ) from error


class MemoryLimit(TrainerCallback):
    """Have the model of a `Trainer` follow a plan during `train()`, and restore its own forward at the end.

    The limit applies to each process. A `Checkpointable` keeps its own limit.

    Args:
        mem_limit: limit of a whole step's peak, as for `Checkpointable`.
        settings: other arguments of `Checkpointable`: mainly `loss`, a function of the output, if that has no loss.

    After an error in `train()`, which then calls no callback, call `end()` to restore the model's own forward.

    Raises ValueError and TypeError as `Checkpointable` does.
    """

    def __init__(self, mem_limit: float | str | None = None, **settings: Any) -> None:
        self._models = InPlace(mem_limit, settings)
        self.planned: Checkpointable | None = None
        """The planned model of the last `train()`, for `report()` and `summary()`; None before the first."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Plan the model that this training uses: with `model_init`, each `train()` makes a new one."""
        if args.n_gpu > 1:
            message = (
                "start a process for each device (torchrun), or show one of them (CUDA_VISIBLE_DEVICES=0): a plan is "
                f"for one device, and nn.DataParallel trains the model on {args.n_gpu}"
            )
            raise UnsupportedModelError(message, kind="several_devices", devices=args.n_gpu)
        self.planned = self._models.plan(kwargs["model"])

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.end()

    def end(self) -> None:
        """Restore the model's own forward."""
        self._models.take_away()
