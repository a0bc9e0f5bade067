"""What `compile=` may be: options of Inductor, as `torch.compile` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rotor_py.compiled.stage_code import Config
from rotor_py.errors import InvalidTypeError, InvalidValueError

Compile = bool | str | Mapping[str, Any]
"""True, a mode of `torch.compile`, or options of Inductor by name."""


def config_of(given: Compile) -> Config | None:
    """The options of Inductor that `compile=` stands for; None where nothing is to be compiled.

    ValueError for a mode or an option that does not exist, or that records CUDA graphs; TypeError for anything else.
    """
    if given is False:
        return None
    if not (given is True or isinstance(given, str | Mapping)):
        raise InvalidTypeError(
            f"compile is {given!r}; it can be True, a mode of torch.compile, or a dict of Inductor's options",
            kind="unknown_value",
            name="compile",
        )
    mode = given if isinstance(given, str) else None
    options = dict(given) if isinstance(given, Mapping) else None
    try:
        # What torch.compile itself makes of a mode and of options, with its checks.
        found: dict[str, Any] = torch._TorchCompileInductorWrapper(mode, options, dynamic=False).config
    except RuntimeError as error:
        raise InvalidValueError(f"compile={given!r}: {error}", kind="unknown_value", name="compile") from error
    return without_cuda_graphs(found, f"compile={given!r}")


def without_cuda_graphs(options: Mapping[str, Any], what: str) -> Config:
    """These options of Inductor. ValueError if CUDA graphs would be recorded; `what` says who gave them."""
    from torch._inductor import config  # here, since most plans do without Inductor

    if "triton.cudagraphs" not in options and config.triton.cudagraphs:
        what = "torch._inductor.config.triton.cudagraphs (TORCHINDUCTOR_CUDAGRAPHS)"
    if options.get("triton.cudagraphs", config.triton.cudagraphs):
        raise InvalidValueError(
            f"{what} records CUDA graphs, which keep their memory for good, while a plan frees it and uses it again; "
            'take the mode "max-autotune-no-cudagraphs", or the default',
            kind="cuda_graphs",
            name=what,
        )
    return tuple(sorted(options.items()))
