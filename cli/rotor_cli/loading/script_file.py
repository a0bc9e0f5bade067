"""Whether a Python file is a model file or a training script, told from its text: importing it might train.

Nothing here needs torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

_DYNAMIC = {"exec", "globals", "setattr", "vars"}
"""Functions by which a file may define names that are not written in it."""


def defines(path: str, names: Iterable[str]) -> bool:
    """Whether importing the file defines all of these names; True where its text does not tell."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):  # it says so itself, when it is read
        return True
    found = set(_defined(tree.body))
    return "*" in found or "__getattr__" in found or found.issuperset(names) or _is_dynamic(tree)


def _defined(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that these statements bind in the module."""
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
                continue
            case ast.If(test=test, orelse=orelse) if _is_main_guard(test):
                yield from _defined(orelse)
                continue
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((each.asname or each.name).partition(".")[0] for each in names)
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                yield from _defined([child])
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from _defined(child.body)
            else:
                names_in = (each for each in ast.walk(child) if isinstance(each, ast.Name))
                yield from (each.id for each in names_in if isinstance(each.ctx, ast.Store))


def _is_main_guard(test: ast.expr) -> bool:
    """Whether it is `__name__ == "__main__"`, with what may stand beside it."""
    return any(isinstance(each, ast.Constant) and each.value == "__main__" for each in ast.walk(test))


def _is_dynamic(tree: ast.Module) -> bool:
    return any(
        isinstance(each, ast.Global) or (isinstance(each, ast.Name) and each.id in _DYNAMIC) for each in ast.walk(tree)
    )
