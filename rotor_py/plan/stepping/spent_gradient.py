"""A gradient that is gone: its parameter was stepped with it.

Between the backward and the optimizer's step, a training loop may clip gradients, unscale them, add them up or log
them. With gradients that are simply None, all of that would do nothing, without a word. So what a parameter has instead
is a tensor without memory that cannot be read.
"""

from __future__ import annotations

from typing import Any

import torch

from rotor_py.errors import DescribedError


class SpentGradientError(DescribedError, RuntimeError):
    """A gradient was read after its parameter had been stepped with it."""


class SpentGradient(torch.Tensor):
    """Looks like the gradient of a parameter, takes no memory, and raises SpentGradientError when it is read."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way, untyped

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> SpentGradient:
        made: SpentGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]  # torch passes what is never given here
        return f"SpentGradient(shape={tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SpentGradient:
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch has another signature here than in its documentation
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise SpentGradientError(
            f"{operator} reads a gradient that is gone: step_in_backward has stepped its parameter with it in the "
            "backward already, so nothing can clip, log, unscale or add to it afterwards (clip_grad_norm_, "
            "max_grad_norm, a GradScaler, accumulation); leave that out, or step_in_backward",
            kind="gradient_spent",
            name=str(operator),
        )
