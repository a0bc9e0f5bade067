"""`limit_memory(accelerator, "4GB")`: train the model that an Accelerator prepares within a memory limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import record_fields
from rotor_py.integrations.in_place import InPlace

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "rotor_py's hook needs Accelerate, which is not installed: pip install accelerate", name="accelerate"
    ) from error

_log = logging.getLogger("rotor_py")


class limit_memory:  # noqa: N801  (users call it like a function)
    """Let the next model given to `accelerator.prepare` follow a plan, until `end()` or `accelerator.end_training()`.

    Plans the first model with trainable parameters, in place. The limit is for one model: a second one trains without a
    plan, and a warning is logged. Every process has this limit. A model that is a `Checkpointable` keeps its own limit.

    Args:
        accelerator: an Accelerator that has not prepared the model yet.
        mem_limit: limit of a whole step's peak, as for `Checkpointable`.
        settings: other arguments of `Checkpointable`: mainly `loss`, a function of the output, if that has no loss.

    Raises ValueError and TypeError as `Checkpointable` does.
    """

    def __init__(self, accelerator: Accelerator, mem_limit: float | str | None = None, **settings: Any) -> None:
        self._models = InPlace(mem_limit, settings)
        self._accelerator = accelerator
        self._end_training = accelerator.end_training
        self.planned: Checkpointable | None = None
        """The planned model, for `report()` and `summary()`; None until one has been prepared."""
        # Patch `prepare` as well: with FSDP2 and DeepSpeed, it does not call `prepare_model`.
        for name in ("prepare", "prepare_model"):
            setattr(accelerator, name, partial(self._planned_first, getattr(accelerator, name)))
        accelerator.end_training = self._end

    def _planned_first(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for model in (*args, *kwargs.values()):
            if not isinstance(model, nn.Module) or not any(each.requires_grad for each in model.parameters()):
                continue
            if self.planned is None:
                self.planned = self._models.plan(model)
            elif self.planned.model is not model:
                said = "to plan %s, too, use Checkpointable(model, mem_limit=...): the limit is for %s, prepared first"
                names = type(model).__name__, type(self.planned.model).__name__
                _log.warning(said, *names, extra=record_fields("second_model"))
        return prepare(*args, **kwargs)

    def _end(self) -> None:
        self.end()
        self._end_training()

    def end(self) -> None:
        """Restore the model's own forward and the accelerator's methods; `accelerator.end_training()` does it too."""
        self._models.take_away()
        for name in ("prepare", "prepare_model", "end_training"):
            self._accelerator.__dict__.pop(name, None)
