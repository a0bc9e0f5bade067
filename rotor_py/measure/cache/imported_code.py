"""The code that a class of the user's may run: all that is imported, but for that of Python, of torch, and ours."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import time
from functools import cache, lru_cache
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

_STARTED = time.time()
"""When this file was read, and most others: what is written later is not what this process runs."""
_OURS = frozenset({"rotor_py", "rotor_profiling", "rotor_solver", "rotor_cli"})
"""Packages that have a digest of their own."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def code_of(kind: type) -> str | None:
    """A digest of the code that a class may run; None where nobody can say.

    A layer calls what its file imports, and that calls other files. So all files count that the process has imported,
    and the versions of all libraries: one measurement too many is better than one of other code. A class that was made
    in a function or typed into a notebook has no code that a later process would find, and nor has a file that was
    written since it was read.
    """
    module = sys.modules.get(kind.__module__)
    if module is None or "<locals>" in kind.__qualname__ or not isinstance(getattr(module, "__file__", None), str):
        return None
    return _digest(len(sys.modules), int(time.monotonic()))


@lru_cache(maxsize=1)  # a model has many layers
def _digest(_modules: int, _second: int) -> str | None:
    found = hashlib.sha256(_installed().encode())
    for file in sorted({file for each in list(sys.modules.values()) if (file := _file_of(each)) is not None}):
        try:
            if file.stat().st_mtime > _STARTED:
                return None
            content = file.read_bytes()
        except OSError:
            return None
        found.update(f"\n{file.name} {len(content)}\n".encode() + content)
    return found.hexdigest()


@cache
def _installed() -> str:
    """The libraries that are there, whether or not they have been imported: some are, while a model is measured."""
    return " ".join(sorted(f"{each.name} {each.version}" for each in distributions()))


def _file_of(module: ModuleType) -> Path | None:
    """The file of a module of the user's; None for another one."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(file, str) or file.startswith(_LIBRARIES) or name.partition(".")[0] in _OURS:
        return None
    return None if name.startswith("torch.") else Path(file)  # some of torch have names of files that are not there
