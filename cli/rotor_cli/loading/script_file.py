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
    found = defined_names(path)
    return found is None or set(found).issuperset(names)


def defined_names(path: str) -> tuple[str, ...] | None:
    """The names that importing the file may define, in their order; None where its text does not tell."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):  # it says so itself, when it is read
        return None
    found = tuple(dict.fromkeys(_defined(tree.body)))
    return None if {"*", "__getattr__"} & {*found} or _is_dynamic(tree) else found


def _defined(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that these statements bind in the module; `*` for some that are not written."""
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
            match child:
                case ast.stmt():
                    yield from _defined([child])
                case ast.ExceptHandler():
                    yield from _defined(child.body)
                case ast.match_case():
                    yield from (bound for each in ast.walk(child.pattern) if (bound := _captured(each)) is not None)
                    yield from _defined(child.body)
                case _:
                    names_in = [each for each in ast.walk(child) if isinstance(each, ast.Name)]
                    yield from (each.id for each in names_in if isinstance(each.ctx, ast.Store))
                    yield from ("*" for each in names_in if each.id == "locals")


def _captured(pattern: ast.AST) -> str | None:
    match pattern:
        case ast.MatchAs(name=name) | ast.MatchStar(name=name) | ast.MatchMapping(rest=name):
            return name
    return None


def _is_main_guard(test: ast.expr) -> bool:
    """Whether it is `__name__ == "__main__"`, or that and more: not so where the file is imported."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return any(map(_is_main_guard, values))
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return any(isinstance(each, ast.Constant) and each.value == "__main__" for each in (left, right))
    return False


def _is_dynamic(tree: ast.Module) -> bool:
    return any(
        isinstance(each, ast.Global)
        or (isinstance(each, ast.Name) and each.id in _DYNAMIC)
        or (isinstance(each, ast.Attribute) and ast.unparse(each) == "sys.modules")
        for each in ast.walk(tree)
    )
