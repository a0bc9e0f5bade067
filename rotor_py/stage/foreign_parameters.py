"""Find parameters that a stage reads but does not own: those of a layer that it only refers to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rotor_profiling.storage import storages, tensors_in
from rotor_profiling.torch_compat import TorchDispatchMode


class ForeignParameters(TorchDispatchMode):
    """Collect in `found` those of `parameters` that operators read and `function` does not own."""

    def __init__(self, function: Callable[..., Any], parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        own = storages(function.parameters()) if isinstance(function, torch.nn.Module) else {}
        self._others = {address: each for each in parameters for address in storages([each]) if address not in own}
        self.found: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = storages(tensors_in((args, kwargs)))
        self.found += [self._others[address] for address in read if address in self._others]
        return operator(*args, **(kwargs or {}))
