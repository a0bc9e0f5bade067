"""Where a model is made and measured: on a device that is there, or without memory for one that is not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Literal, Protocol

import torch
from torch import nn

from rotor_cli.loading.sample import moved_to
from rotor_profiling import tensors_in
from rotor_py.devices.device import Devices
from rotor_py.devices.reservation import Reservation
from rotor_py.plan.inputs.sample import arguments_of
from rotor_py.predict.elsewhere import Elsewhere
from rotor_py.predict.training_step import TrainingStep

_HOLDERS: tuple[type, ...] = (torch.Tensor, tuple, list, dict)


class Place(Protocol):
    """A device, and how what a model file makes gets there."""

    @property
    def predicted_for(self) -> Devices | None:
        """The devices that need not be there; None if what runs here is measured."""

    @property
    def device(self) -> torch.device:
        """Where tensors are."""

    @property
    def name(self) -> str:
        """The device in a report."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the region of autocast that steps are taken in; None if they enter one themselves, or none."""

    def together(self) -> AbstractContextManager[object]:
        """All that follows happens inside."""

    def making(self) -> AbstractContextManager[object]:
        """Inside, the user's code makes its model and its sample."""

    def measuring(self) -> AbstractContextManager[object]:
        """Inside, the model is measured and planned."""

    def adopt(self, module: ModuleType) -> None:
        """Bring the tensors that a model file has beside model and sample: targets of a loss, for example."""

    def model(self, model: nn.Module) -> nn.Module:
        """The model, brought there."""

    def sample(self, sample: Any, model: nn.Module) -> Any:
        """What the model is called with, brought there."""

    def follow(self, step: TrainingStep) -> None:
        """Have a model that was measured plan with what a step by its plan shows beside that."""

    def reserve(self, step: TrainingStep, *, keep_limit: bool) -> Reservation | None:
        """What the allocator reserves for a step by the plan that was found; None if that is not predicted.

        Unless `keep_limit`, there may be a smaller limit afterwards, and a plan that leaves room for it.
        """


class Here:
    """A device of this machine."""

    predicted_for = None
    autocast = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)

    def together(self) -> AbstractContextManager[object]:
        return nullcontext()

    def making(self) -> AbstractContextManager[object]:
        return nullcontext()

    def measuring(self) -> AbstractContextManager[object]:
        return nullcontext()

    def adopt(self, module: ModuleType) -> None:
        """They are where they are."""

    def model(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def sample(self, sample: Any, model: nn.Module) -> Any:
        return moved_to(self.device, sample)

    def follow(self, step: TrainingStep) -> None:
        """A step that really runs shows it by itself."""

    def reserve(self, step: TrainingStep, *, keep_limit: bool) -> Reservation | None:
        """The allocator that is there shows it by itself."""
        return None


class There:
    """Devices of the table: tensors are on the CPU, and take no memory."""

    device = torch.device("cpu")

    def __init__(
        self,
        predicted_for: Devices,
        precision: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        shard: Literal["blocks", "whole"] | None = None,
    ) -> None:
        self.predicted_for = predicted_for
        self.autocast = autocast
        self.name = predicted_for.name
        self._elsewhere = Elsewhere(predicted_for, shard=shard, precision=precision)

    def together(self) -> AbstractContextManager[object]:
        return self._elsewhere.together()

    def making(self) -> AbstractContextManager[object]:
        return self._elsewhere.making()

    def measuring(self) -> AbstractContextManager[object]:
        return self._elsewhere.measuring()

    def adopt(self, module: ModuleType) -> None:
        for name, value in list(vars(module).items()):
            if isinstance(value, _HOLDERS) and any(each.is_meta for each in tensors_in(value)):
                setattr(module, name, self._elsewhere.without_memory.value(value))

    def model(self, model: nn.Module) -> nn.Module:
        return self._elsewhere.model(model)

    def sample(self, sample: Any, model: nn.Module) -> Any:
        arguments, keywords = arguments_of(sample, model)  # of a DataLoader, the first batch
        return self._elsewhere.without_memory.value(keywords or arguments)

    def follow(self, step: TrainingStep) -> None:
        self._elsewhere.follow(step)

    def reserve(self, step: TrainingStep, *, keep_limit: bool) -> Reservation | None:
        return self._elsewhere.reserve(step, keep_limit=keep_limit)
