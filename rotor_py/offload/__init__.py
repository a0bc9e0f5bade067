"""Offload activations to another memory tier. This module only parses tier names: `host`, or `file:/path`.

It does not import torch, so that the command line reports a mistyped name at once.
"""

from __future__ import annotations

from rotor_py.errors import InvalidValueError

FILE = "file:"


def refuse_other_names(name: str) -> None:
    """Raise ValueError unless `name` is the name of a tier."""
    if name != "host" and not (isinstance(name, str) and name.startswith(FILE) and name != FILE):
        message = f"offload must be 'host' (for a CUDA device) or 'file:/path/of/a/folder', got {name!r}"
        raise InvalidValueError(message, kind="unknown_value", name="offload")
