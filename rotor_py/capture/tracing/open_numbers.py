"""Numbers that modules hold, and that TorchDynamo is to leave open: those that have changed since it traced last.

It takes a number of a module for a constant, and traces anew when it is another one. A model that counts its calls
would be traced in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import ConstantVariable, builder

from rotor_py.capture.tracing.settings_of import settings_of

_NUMBER = "is_int_specialization_case"
"""The function by which TorchDynamo decides that an integer is a number, where it has one."""


class OpenNumbers:
    """The numbers in attributes of one model's modules, by name, that are left open."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[tuple[str, str], int | float] = {}
        """By module and name, when TorchDynamo traced last."""
        self.names: set[str] = set()

    def look(self) -> None:
        """TorchDynamo is about to trace: see which numbers are not what they were the last time."""
        now = {
            (path, name): value
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (int, float)
        }
        self.names |= {key[1] for key, value in now.items() if self._seen.get(key, value) != value}
        self._seen = now

    @contextmanager
    def left_open(self) -> Iterator[None]:
        """Have TorchDynamo take symbols for these numbers, and for no others that modules hold."""
        usual: Any = builder.VariableBuilder.wrap_symfloat

        def wrap(variables: Any, value: float) -> Any:
            if self._is_open(variables.source):
                return usual(variables, value)
            variables.install_guards(GuardBuilder.CONSTANT_MATCH)
            return ConstantVariable.create(value=value, source=variables.source)

        floats: dict[str, Any] = {"specialize_float": False} if self.names else {}
        with (
            settings_of(builder, self._of_integers()),
            settings_of(torch._dynamo.config, floats),
            settings_of(builder.VariableBuilder, {"wrap_symfloat": wrap} if self.names else {}),
        ):
            yield

    def _of_integers(self) -> dict[str, Callable[..., bool]]:
        """What `builder` is given: integers of the modules of `fully_shard` are numbers, too, if they are not open."""
        usual = getattr(builder, _NUMBER, None)
        if usual is None:
            return {}

        def is_number(value: Any, source: Any) -> bool:
            if self._is_open(source):
                return False
            place = source.guard_source
            return bool(usual(value, source) or (place() if callable(place) else place).is_fsdp_module())

        return {_NUMBER: is_number}

    def _is_open(self, source: Any) -> bool:
        return getattr(source, "member", None) in self.names
