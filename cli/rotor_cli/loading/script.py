"""A training script, run as `python script.py arguments` runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


@contextmanager
def main_module(path: str, arguments: tuple[str, ...]) -> Iterator[ModuleType]:
    """Inside, the module `__main__` is the one that `run_script` fills, and `sys.argv` and `sys.path` are the script's.

    It goes on being `__main__` when the script has ended: its functions are called again to measure, and processes that
    it starts import it by that name.
    """
    file = str(Path(path).resolve())
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __loader__=SourceFileLoader("__main__", file), __builtins__=__builtins__)
    before, argv, folders = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    try:
        yield module
    finally:
        sys.modules["__main__"] = before
        sys.argv, sys.path[:] = argv, folders


def run_script(module: ModuleType) -> None:
    """Run the file of `module` in it."""
    # Not by runpy: it clears the module when the script ends.
    file = str(module.__file__)
    exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)
