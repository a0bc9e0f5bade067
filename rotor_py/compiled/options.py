"""What `compile=` may be: options of Inductor, as `torch.compile` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rotor_py.compiled.stage_code import Config

Compile = bool | str | Mapping[str, Any]
"""True, a mode of `torch.compile`, or options of Inductor by name."""


def config_of(given: Compile) -> Config | None:
    """The options of Inductor that `compile=` stands for; None where nothing is to be compiled.

    ValueError for a mode or an option that does not exist, or that records CUDA graphs; TypeError for anything else.
    """
    if given is False:
        return None
    if not (given is True or isinstance(given, str | Mapping)):
        raise TypeError(
            f"compile is {given!r}; it can be True, a mode of torch.compile, or a dict of Inductor's options"
        )
    mode = given if isinstance(given, str) else None
    options = dict(given) if isinstance(given, Mapping) else None
    try:
        # What torch.compile itself makes of a mode and of options, with its checks.
        found: dict[str, Any] = torch._TorchCompileInductorWrapper(mode, options, dynamic=False).config
    except RuntimeError as error:
        raise ValueError(f"compile={given!r}: {error}") from error
    if found.get("triton.cudagraphs"):
        raise ValueError(
            f"compile={given!r} records CUDA graphs, which keep their memory for good, while a plan frees it and uses "
            'it again; write compile="max-autotune-no-cudagraphs" or compile=True'
        )
    return tuple(sorted(found.items()))
