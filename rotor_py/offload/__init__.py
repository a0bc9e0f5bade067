"""Activations in another tier of memory. Here is only how a user names one: `host`, or `file:/path`.

Nothing here needs torch, so that a typing error is told before it is imported.
"""

from __future__ import annotations

from rotor_py.errors import InvalidValueError

FILE = "file:"


def refuse_other_names(name: str) -> None:
    """ValueError for what is not the name of a tier."""
    if name != "host" and not (isinstance(name, str) and name.startswith(FILE) and name != FILE):
        raise InvalidValueError(
            f"offload is {name!r}; it can be 'host' (for a CUDA device) or 'file:/path/of/a/folder'",
            kind="unknown_value",
            name="offload",
        )
