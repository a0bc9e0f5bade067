"""Where a model is, as the command line says it: `file.py`, `file.py:name` or `package.module:name`.

Nothing here needs torch, so that a typing error is told at once.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from rotor_cli.errors import usage


def split_target(target: str) -> tuple[str, str]:
    """The file or module, and the name in it; Failure if the text names neither."""
    if target.endswith(".py"):
        return _present(target), "model"
    location, colon, name = target.rpartition(":")
    if not colon:
        if Path(target).exists():
            raise usage(f"{target} is not a Python file; write file.py, file.py:name or package.module:name")
        raise usage(f"{target!r} names no model; write file.py, file.py:name or package.module:name")
    return _present(location), name


def _present(location: str) -> str:
    if location.endswith(".py") and not Path(location).is_file():
        folder = Path(location).parent
        beside = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
        near = get_close_matches(Path(location).name, beside, n=1)
        raise usage(f"there is no file {location}" + (f"; did you mean {folder / near[0]}?" if near else ""))
    return location
