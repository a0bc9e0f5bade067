"""Where a step is planned for a device that is not there: what is made there, and what is measured there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from rotor_profiling.instruments import using
from rotor_py.devices.device import Device
from rotor_py.errors import UnsupportedModelError
from rotor_py.predict.prediction import prediction_for
from rotor_py.predict.without_memory import WithoutMemory, made_without_memory


class Elsewhere:
    """A place for models that are planned for `device`, which need not be there."""

    def __init__(self, device: Device) -> None:
        self.device = device
        # Tensors with memory come in with losses: a target, for example.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.without_memory = WithoutMemory(self._mode)
        """what makes models, samples and optimizers without memory of others"""

    making = staticmethod(made_without_memory)
    """Inside, models are made on the meta device."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, tensors that are made take no memory, and what is measured is predicted for the device.

        UnsupportedModelError for what reads values.
        """
        try:
            with using(prediction_for(self.device)), self._mode:
                yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            where = "; ".join(getattr(error, "__notes__", ()))
            raise UnsupportedModelError(
                f"{error.func} depends on values{f' ({where})' if where else ''}, and where nothing is computed there "
                "are none; plan the model on a device that is here, or give it sizes that do not depend on its data"
            ) from error
