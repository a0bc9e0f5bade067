"""Whether calling a module calls its forward and nothing else."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def calls_forward_alone(module: nn.Module) -> bool:
    """Whether no hook, no compiler and no other forward comes between a call of `module` and what its class defines.

    The same of all modules in it.
    """
    return not _has_any_global_hook() and not any(map(_watched, module.modules()))


def _watched(module: nn.Module) -> bool:
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    replaced = "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__
    return any(tables) or replaced or module._compiled_call_impl is not None
