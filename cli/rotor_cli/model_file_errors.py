"""Check MODEL and the text of its file before anything is imported.

Importing a training script might train, and importing torch takes seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from rotor_cli.errors import Failure, usage

EXAMPLE = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10))

def sample(batch):
    return torch.randn(batch, 1024)

def loss(output):                      # optional
    return output.square().mean()

def optimizer(parameters):             # optional
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
WANTED_SAMPLE = "an input called 'sample' (a tensor, tuple or dict, or a function of the batch size)"
_DYNAMIC = {"exec", "globals", "setattr", "vars"}
"""Functions that may define names not written in the file."""


def split_target(target: str) -> tuple[str, str]:
    """Split into file or module, and name. Raises Failure if the text names neither."""
    if target.endswith(".py"):
        return _present(target), "model"
    location, colon, name = target.rpartition(":")
    if not colon:
        if Path(target).exists():
            raise usage(
                f"{target} is not a Python file; write file.py, file.py:name or package.module:name",
                kind="not_python",
                name=target,
            )
        raise usage(
            f"{target!r} names no model; write file.py, file.py:name or package.module:name",
            kind="not_a_model",
            name=target,
        )
    return _present(location), name


def refuse_missing_module(location: str) -> None:
    """Raise Failure for a module whose package is missing. Imports nothing, not even the package."""
    package = location.partition(".")[0]
    sys.path.insert(0, "")  # search the current folder too, as `python -m` does
    try:
        found = package in sys.modules or (package and importlib.util.find_spec(package) is not None)
    finally:
        sys.path.remove("")
    if not found:
        raise no_module(location)


def no_module(location: str) -> Failure:
    """The failure for a missing module."""
    return usage(
        f"there is no module {location!r} to import, and no file of that name ending in .py",
        kind="no_such_module",
        name=location,
    )


def _present(location: str) -> str:
    if location.endswith(".py") and not Path(location).is_file():
        folder = Path(location).parent
        beside = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
        near = get_close_matches(Path(location).name, beside, n=1)
        raise usage(
            f"there is no file {location}" + (f"; did you mean {folder / near[0]}?" if near else ""),
            kind="no_such_file",
            name=location,
        )
    return location


def wanted_model(name: str) -> str:
    """Describe the model of a file."""
    return f"a model called {name!r} (a torch.nn.Module, or a function that makes one)"


def unusable(file: str, names: Iterable[str], wanted: str) -> Failure:
    """The failure for a file that defines `names` but not `wanted`, with a working example."""
    defined = ", ".join(name for name in names if not name.startswith("_")) or "nothing"
    return usage(
        f"{file} has to define {wanted}; it defines {defined}. A file that works:\n\n{EXAMPLE}",
        kind="not_defined",
        name=wanted,
    )


def refuse_file_without(name: str, file: str) -> None:
    """Raise Failure if the file's text defines no model of this name."""
    defined = defined_names(file)
    if defined is not None and name not in defined:
        raise unusable(file, defined, wanted_model(name))


def defines(path: str, names: Iterable[str]) -> bool:
    """Whether importing the file defines all of these names; True if its text does not tell."""
    found = defined_names(path)
    return found is None or set(found).issuperset(names)


def defined_names(path: str) -> tuple[str, ...] | None:
    """Names that importing the file may define, in order; None if its text does not tell."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):  # reported when the file is imported
        return None
    found = tuple(dict.fromkeys(_defined(tree.body)))
    return None if {"*", "__getattr__"} & {*found} or _is_dynamic(tree) else found


def _defined(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that these statements bind in the module; `*` for some that are not written."""
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
    """Whether the test includes `__name__ == "__main__"`, which is false on import."""
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
