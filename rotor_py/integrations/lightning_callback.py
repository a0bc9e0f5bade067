"""`lightning.Trainer(callbacks=[MemoryLimit("4GB")])`: train the network of a LightningModule within a limit."""

from __future__ import annotations

from typing import Any

from torch import nn

from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import UnsupportedModelError
from rotor_py.integrations.in_place import InPlace

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "rotor_py's callback needs Lightning, which is not installed: pip install lightning", name="lightning"
    ) from error


_NAME_IT = "name the module that training_step calls: MemoryLimit(..., network='model'), or network='' for self(...)"


class MemoryLimit(Callback):
    """Have the network of a LightningModule follow a plan during `fit`; restore its own forward afterwards.

    The limit applies to each process. A `Checkpointable` network keeps its own limit.

    Args:
        mem_limit: limit of a whole step's peak, as for `Checkpointable`.
        network: the name of the module that `training_step` calls, such as "model" or "model.encoder", as
            `get_submodule` takes it; "" is the LightningModule itself, for a `training_step` that calls `self(batch)`.
            None: the child with the most parameters.
        settings: other arguments of `Checkpointable`: mainly `loss`, a function of the network's output.

        Raises ValueError and TypeError as `Checkpointable` does. `fit` raises AttributeError if no module has that
        name, and UnsupportedModelError if `network` is None and no child has more than half of the parameters.
    """

    def __init__(self, mem_limit: float | str | None = None, network: str | None = None, **settings: Any) -> None:
        self._models = InPlace(mem_limit, settings)
        self._network = network
        self.planned: Checkpointable | None = None
        """The planned network of the last `fit`, for `report()` and `summary()`; None before the first."""

    # Not in `setup`: at that time, `configure_model` has not run, and the model is not on its device.
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name = largest_child(pl_module) if self._network is None else self._network
        self.planned = self._models.plan(pl_module.get_submodule(name))
        self._planned_name = name

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Raise UnsupportedModelError if the step did not call the planned network, whose plan would save nothing."""
        if not self._models.called:
            name = self._planned_name or "forward"
            message = f"{_NAME_IT}; {type(pl_module).__name__} does not call {name}, which is planned"
            raise UnsupportedModelError(message, kind="network_not_called", name=name)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._models.take_away()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._models.take_away()


def largest_child(module: nn.Module) -> str:
    """Return the name of the child with more than half of the parameters; raise UnsupportedModelError if none has."""
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()}
    largest = max(sizes, key=lambda name: sizes[name], default=None)
    if largest is None or 2 * sizes[largest] <= sum(p.numel() for p in module.parameters()):
        found = ", ".join(f"{name} ({size:,})" for name, size in sizes.items() if size) or "none"
        message = f"no child of {type(module).__name__} has more than half of its parameters ({found}); {_NAME_IT}"
        raise UnsupportedModelError(message, kind="which_network", name="network")
    return largest
