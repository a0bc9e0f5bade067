"""Names that torch has, read from its files: importing it takes seconds, and a typing error is answered before that.

Where the files have another form than today's, nothing is known here. What torch itself says counts then, later on.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_DTYPE = re.compile(r"^(\w+): dtype = \.\.\.", re.MULTILINE)
_OF_FEW_BITS = frozenset(("bit", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))))
"""The stubs leave these out."""
_FLOATING = re.compile(r"b?float|half$|double$")


@cache
def dtypes() -> frozenset[str]:
    """The names of dtypes, as torch's stubs for type checkers have them; none if they are not known."""
    found = _DTYPE.findall(_text("_C/__init__.pyi"))
    return _OF_FEW_BITS.union(found) if found else frozenset()


def floating_dtypes() -> frozenset[str]:
    """Those of floating-point numbers."""
    return frozenset(name for name in dtypes() if _FLOATING.match(name))


@cache
def optimizers() -> dict[str, tuple[str, str]]:
    """The optimizers of `torch.optim` by their names in small letters: file and class; none if they are not known."""
    found = {}
    for node in _tree("optim/__init__.py").body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.optim."):
            file = f"{str(node.module).removeprefix('torch.').replace('.', '/')}.py"
            classes = (each.name for each in node.names if each.name[0].isupper() and each.name != "Optimizer")
            found.update({name.lower(): (file, name) for name in classes})
    return found


def arguments_of(optimizer: str) -> frozenset[str] | None:
    """What the optimizer of this name in small letters takes; None if that is not known."""
    file, name = optimizers()[optimizer]
    for made in _functions(file, name, "__init__"):
        given = made.args
        return frozenset(each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    return None


def _functions(file: str, class_name: str, name: str) -> Iterator[ast.FunctionDef]:
    for node in _tree(file).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            yield from (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name)


def _tree(file: str) -> ast.Module:
    try:
        return ast.parse(_text(file))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _text(file: str) -> str:
    found = importlib.util.find_spec("torch")  # looks for it, and does not import it
    folders = [] if found is None else found.submodule_search_locations or []
    try:
        return "".join((Path(folder) / file).read_text(encoding="utf-8") for folder in folders)
    except (OSError, ValueError):
        return ""
