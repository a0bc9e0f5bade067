"""Where a model is, as the command line says it: `file.py`, `file.py:name` or `package.module:name`.

Nothing here needs torch, so that a typing error is told at once.
"""

from __future__ import annotations

import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path

from rotor_cli.errors import Failure, usage


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


def refuse_missing_module(location: str) -> None:
    """Failure for a module whose package is not there. Nothing is imported to see that, neither is the package."""
    package = location.partition(".")[0]
    sys.path.insert(0, "")  # as `python -m` finds modules: in the folder that it is called in, too
    try:
        found = package in sys.modules or (package and importlib.util.find_spec(package) is not None)
    finally:
        sys.path.remove("")
    if not found:
        raise no_module(location)


def no_module(location: str) -> Failure:
    """The failure for a module that is not there."""
    return usage(f"there is no module {location!r} to import, and no file of that name ending in .py")


def _present(location: str) -> str:
    if location.endswith(".py") and not Path(location).is_file():
        folder = Path(location).parent
        beside = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
        near = get_close_matches(Path(location).name, beside, n=1)
        raise usage(f"there is no file {location}" + (f"; did you mean {folder / near[0]}?" if near else ""))
    return location
