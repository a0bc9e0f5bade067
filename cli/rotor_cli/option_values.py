"""Parse option texts: shape, dtype, optimizer, configuration.

Importing torch takes seconds, so its names are read from its files, to report typos at once. If the files have another
form, no names are known here, and torch reports the error later.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from rotor_cli.errors import Failure, usage

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
    "momentum": {"momentum": 0.9},
}
_DTYPE = re.compile(r"^(\w+): dtype = \.\.\.", re.MULTILINE)
_OF_FEW_BITS = frozenset(("bit", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))))
"""Dtypes that the stubs omit."""
_FLOATING = re.compile(r"b?float|half$|double$")


def shape_of(text: str) -> tuple[list[int], str]:
    """Sizes and dtype name of a shape such as `32,3,224,224` or `8,128:int64`. Raises Failure if invalid."""
    sizes, _, kind = text.partition(":")
    try:
        dimensions = [int(size) for size in sizes.split(",")]
    except ValueError:
        dimensions = []
    if not dimensions or min(dimensions) < 1 or (kind and dtypes() and kind not in dtypes()):
        raise no_shape(text)
    return dimensions, kind or "float32"


def no_shape(text: str) -> Failure:
    """The failure for an invalid shape."""
    return usage(
        f"--input {text!r} is not a shape; write for example 32,3,224,224 or 8,128:int64",
        kind="no_shape",
        name="--input",
    )


def floating_dtype(text: str, option: str) -> str:
    """torch's name of a floating-point dtype: `bfloat16` for `bf16`. Raises Failure if there is none."""
    name = _SHORT.get(text, text)
    if floating_dtypes() and name not in floating_dtypes():
        raise no_floating_dtype(text, option)
    return name


def no_floating_dtype(text: str, option: str) -> Failure:
    """The failure for an unknown floating-point dtype."""
    return usage(
        f"{option} {text!r} is no kind of floating-point number; write bfloat16, float16 or float32",
        kind="bad_value",
        name=option,
    )


def autocast_dtype(text: str) -> str:
    """Name of a dtype that autocast supports. Raises Failure for any other."""
    name = floating_dtype(text, "--autocast")
    if name not in ("bfloat16", "float16", "half"):
        raise usage(
            f"--autocast {text} casts to nothing lower; write bfloat16 or float16", kind="bad_value", name="--autocast"
        )
    return name


def optimizer_and_options(
    text: str, known: Collection[str], arguments_of: Callable[[str], Collection[str] | None]
) -> tuple[str, dict[str, Any]]:
    """Split `adamw-fused` into `adamw` and its arguments.

    `known` are torch's optimizers in lowercase, and `arguments_of` returns the arguments of each, if known. Raises
    Failure for an unknown name, or a variant that the optimizer does not take.
    """
    base, _, variant = text.lower().partition("-")
    if base not in known:
        near = get_close_matches(base, known, n=3) or ["adamw", "sgd", "adafactor"]
        raise usage(
            f"--optimizer {text!r} is none of torch.optim; did you mean {' or '.join(near)}?",
            kind="bad_value",
            name="--optimizer",
        )
    if not variant:
        return base, {}
    options, takes = _VARIANTS.get(variant), arguments_of(base)
    if takes is not None and (options is None or not options.keys() <= set(takes)):
        there = [f"{base}-{key}" for key, each in _VARIANTS.items() if each.keys() <= set(takes)]
        raise usage(
            f"--optimizer {text!r}: there is no such variant; there is {', '.join((base, *there))}",
            kind="bad_value",
            name="--optimizer",
        )
    return base, options or {}


def configuration(text: str | None) -> dict[str, Any]:
    """Settings from JSON text, or a file of it. Raises Failure if it is neither."""
    if text is None:
        return {}
    written = text
    try:
        if not text.lstrip().startswith("{"):
            if not Path(text).is_file():
                raise usage(
                    f"--config {text!r} is neither JSON, such as '{{\"n_layer\": 8}}', nor a file of it",
                    kind="bad_value",
                    name="--config",
                )
            written = Path(text).read_text(encoding="utf-8")
        settings = json.loads(written)
    except ValueError as error:
        raise usage(f"--config is not JSON: {error}", kind="bad_value", name="--config") from None
    if not isinstance(settings, dict):
        raise usage(
            f"--config is {type(settings).__name__}; it has to be an object, such as '{{\"n_layer\": 8}}'",
            kind="bad_value",
            name="--config",
        )
    return settings


@cache
def dtypes() -> frozenset[str]:
    """Dtype names in torch's type stubs; empty if unknown."""
    found = _DTYPE.findall(_text("_C/__init__.pyi"))
    return _OF_FEW_BITS.union(found) if found else frozenset()


def floating_dtypes() -> frozenset[str]:
    """Names of floating-point dtypes."""
    return frozenset(name for name in dtypes() if _FLOATING.match(name))


@cache
def optimizers() -> dict[str, tuple[str, str]]:
    """Optimizers of `torch.optim` by lowercase name: file and class; empty if unknown."""
    found = {}
    for node in _tree("optim/__init__.py").body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.optim."):
            file = f"{str(node.module).removeprefix('torch.').replace('.', '/')}.py"
            classes = (each.name for each in node.names if each.name[0].isupper() and each.name != "Optimizer")
            found.update({name.lower(): (file, name) for name in classes})
    return found


def arguments_of(optimizer: str) -> frozenset[str] | None:
    """Arguments of an optimizer by lowercase name; None if unknown."""
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
    found = importlib.util.find_spec("torch")  # finds it without importing it
    folders = [] if found is None else found.submodule_search_locations or []
    try:
        return "".join((Path(folder) / file).read_text(encoding="utf-8") for folder in folders)
    except (OSError, ValueError):
        return ""
