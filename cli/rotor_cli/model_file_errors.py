"""Check MODEL and the text of its file without importing the file, since importing a training script would run it."""

from __future__ import annotations

import ast
import importlib.util
import symtable
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from rotor_cli.failure import Failure, usage

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
REQUIRED_SAMPLE = "an input called 'sample' (a tensor, tuple or dict, or a function of the batch size)"
_NOT_IMPORTED = ("__name__ == '__main__'", "'__main__' == __name__")  # conditions of code that an import does not run
_DYNAMIC = {"exec", "globals", "setattr", "vars"}  # functions that may define names that the file's text does not show


def split_target(target: str) -> tuple[str, str]:
    """Split MODEL into file or module, and name ("model" by default). Raises Failure for others or a missing file."""
    location, colon, name = (target, ":", "model") if target.endswith(".py") else target.rpartition(":")
    if not colon:
        kind, found = (
            ("not_python", "is not a Python file") if Path(target).exists() else ("not_a_model", "names no model")
        )
        raise usage(kind, target, f"{target} {found}; write file.py, file.py:name or package.module:name")
    if location.endswith(".py") and not Path(location).is_file():
        folder = Path(location).parent
        files = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
        near = get_close_matches(Path(location).name, files, n=1)
        hint = f"; did you mean {folder / near[0]}?" if near else ""
        raise usage("no_such_file", location, f"there is no file {location}{hint}")
    return location, name


def refuse_missing_module(location: str) -> None:
    """Raise Failure if Python finds no top-level package of the module `location`; does not import the package."""
    package = location.partition(".")[0]
    sys.path.insert(0, "")  # search the current folder too, as `python -m` does
    try:
        found = package in sys.modules or (package and importlib.util.find_spec(package) is not None)
    finally:
        sys.path.remove("")
    if not found:
        raise no_module(location)


def no_module(location: str) -> Failure:
    message = f"there is no module {location!r} to import, and no file of that name ending in .py"
    return usage("no_such_module", location, message)


def required_model(name: str) -> str:
    return f"a model called {name!r} (a torch.nn.Module, or a function that makes one)"


def unusable(file: str, names: Iterable[str], required: str) -> Failure:
    """Return the failure for a file that defines `names` but not `required`; its message shows an example of a file."""
    return usage("not_defined", required, f"{defines_not(file, names, required)}. A file that works:\n\n{EXAMPLE}")


def defines_not(file: str, names: Iterable[str], required: str) -> str:
    defined = ", ".join(name for name in names if not name.startswith("_")) or "nothing"
    return f"{file} has to define {required}; it defines {defined}"


def refuse_file_without(name: str, file: str) -> None:
    """Raise Failure if the text of `file` shows that importing it does not define `name`."""
    if (defined := defined_names(file)) is not None and name not in defined:
        raise unusable(file, defined, required_model(name))


def defines(path: str, names: Iterable[str]) -> bool:
    """Whether importing the file `path` defines all of `names`; True if its text does not show what it defines."""
    found = defined_names(path)
    return found is None or set(found).issuperset(names)


def defined_names(path: str) -> tuple[str, ...] | None:
    """Return the names that importing the file `path` may define; None if its code, such as `exec`, hides them."""
    try:
        tree = ast.parse(Path(path).read_bytes())
        dynamic = any(
            isinstance(each, ast.Global)
            or (isinstance(each, ast.alias) and each.name == "*")
            or (isinstance(each, ast.FunctionDef) and each.name == "__getattr__")
            or (isinstance(each, ast.Name) and each.id in _DYNAMIC)
            or (isinstance(each, ast.Attribute) and ast.unparse(each) == "sys.modules")
            for each in ast.walk(tree)
        )
        for each in ast.walk(tree):
            if isinstance(each, ast.If) and ast.unparse(each.test) in _NOT_IMPORTED:
                each.body = [ast.Pass()]
        symbols = symtable.symtable(ast.unparse(tree), path, "exec").get_symbols()
    except (SyntaxError, ValueError):  # the import will raise this error
        return None
    if dynamic or any(each.get_name() == "locals" and each.is_referenced() for each in symbols):
        return None
    return tuple(each.get_name() for each in symbols if each.is_assigned() or each.is_imported())
