"""Whether two codes of one stage make the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from rotor_profiling import tensors_in
from rotor_profiling.isolate import accelerators, buffer_slots, isolated
from rotor_py.compiled.stage_code import StageCode


def same_bits(stage: nn.Module, value: Any, needs_gradient: Sequence[bool], one: StageCode, other: StageCode) -> bool:
    """Whether outputs, buffers and gradients of `stage` on `value` are those of `one` if `other` makes them.

    Nothing of the stage is changed. `needs_gradient` says so of every tensor in `value`.
    """
    with _disable_current_modes():  # whoever watches a run of the stage would see these
        expected = _results(stage, value, needs_gradient, one)
        found = _results(stage, value, needs_gradient, other)
    return all(
        theirs is mine if theirs is None or mine is None else torch.equal(mine, theirs)
        for mine, theirs in zip(expected, found, strict=True)
    )


def _results(
    stage: nn.Module, value: Any, needs_gradient: Sequence[bool], code: StageCode
) -> list[torch.Tensor | None]:
    leaves, spec = tree_flatten(value)
    flags = iter(needs_gradient)
    # Copies of leaves: the stage may write into its input.
    entered = [leaf.detach().requires_grad_(next(flags)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in entered]
    device = next(iter(accelerators(tensor.device for tensor in tensors_in(value))), torch.device("cpu"))
    with isolated(stage, device) as parameters, torch.enable_grad():
        made = tensors_in(code.run(stage, tree_unflatten(copies, spec)))
        ends = [tensor for tensor in made if tensor.requires_grad]
        # Drawn after the run: a code that draws other random numbers has other gradients as well.
        arriving = [torch.randn_like(tensor) for tensor in ends]
        wanted = [tensor for tensor in (*tensors_in(entered), *parameters) if tensor.requires_grad]
        gradients = torch.autograd.grad(ends, wanted, arriving, allow_unused=True) if ends and wanted else ()
        buffers = [tensor for _, _, tensor in buffer_slots(stage)]
        return [*(tensor.detach() for tensor in made), *buffers, *gradients]
