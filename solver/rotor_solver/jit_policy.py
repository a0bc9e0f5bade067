"""Compile the solver's kernels, and choose between compiled kernels and plain Python, with bit-identical results.

Compiling takes 10 to 20 seconds, once on a machine; plain Python plans twenty stages in less. A process runs kernels in
plain Python until that has taken `_COMPILING` seconds, or `_IMPORTING` if compiled kernels are on disk: after so much
work, as much again is likely (the rent-or-buy problem). Seconds are estimated, so that every run decides alike.

Import kernel files through `kernels_for` only: any other import loads Numba, which takes time. Numba's disk cache
notices changes only of a kernel's own file, so a kernel uses only kernels and constants of its own file. Call a kernel
with the same types everywhere: processes that compile versions of it at once can mix them up (numba issue 10128).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast

from rotor_solver.watching import holding, watcher

F = TypeVar("F", bound=Callable[..., Any])

# Whether `compiled` leaves kernels as plain Python functions: true while `plain_python` imports a kernel file
_plain: ContextVar[bool] = ContextVar("rotor_solver.plain", default=False)


def compiled(plain: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Decorate a kernel to be compiled at its first call, and cached on disk. `plain` replaces it in plain Python.

    Without `fastmath`, which would reorder sums, so that plain Python gives the same bits. Kernels release the GIL, and
    run on one core: Numba's threads would change the number of threads that PyTorch sums with.
    """
    if _plain.get():
        return lambda function: cast(Any, plain or function)
    import numba

    decorate: Any = numba.njit(cache=True, nogil=True)
    return cast(Callable[[F], F], decorate)


@cache
def plain_python(name: str) -> ModuleType:
    """Import the kernel file `name` as a module of plain Python functions, without Numba."""
    spec: Any = find_spec(name)
    module = module_from_spec(spec)
    with holding(_plain, True):
        spec.loader.exec_module(module)
    return module


PREPARING = "(preparing the solver, once on this machine)"  # Progress text while kernels are compiled

# Seconds of plain Python after which Numba is imported. Not measured; a wrong value wastes about as many seconds.
_IMPORTING = 0.3
# Seconds of plain Python after which kernels are compiled. Not measured; wrong ones waste seconds, once on a machine.
_COMPILING = 4.0


class _Pace:
    spent = 0.0  # Estimated seconds of work in plain Python so far
    compiled: ClassVar[set[str]] = set()  # Files whose compiled kernels are used from now on


def kernels_for(name: str, seconds: float, *arrays: Any) -> tuple[Any, list[Any]]:
    """Return a file's kernels, compiled if `compiling_pays`, and their `arrays`, which are lists for plain Python."""
    if compiling_pays(name, seconds):
        return import_module(name), list(arrays)
    return plain_python(name), [_listed(each) for each in arrays]


def _listed(arrays: Any) -> Any:
    if isinstance(arrays, tuple):
        return type(arrays)(*map(_listed, arrays))
    return arrays.tolist() if hasattr(arrays, "tolist") else arrays


def compiling_pays(name: str, seconds: float) -> bool:
    """Decide whether to use compiled kernels of the file `name`, given that plain Python would take `seconds` more."""
    if name in _Pace.compiled:
        return True
    spent = _Pace.spent + seconds
    if spent <= _IMPORTING or (spent <= _COMPILING and not on_disk(import_module(name))):
        _Pace.spent = spent
        return False
    _Pace.compiled.add(name)
    if (progress := watcher()) is not None and not on_disk(import_module(name)):
        progress(0, 0, PREPARING)
    return True


def on_disk(module: ModuleType) -> bool:
    """Return whether Numba's disk cache has a kernel of this file that is newer than the file."""
    for kernel in vars(module).values():
        if hasattr(kernel, "py_func"):  # one of Numba's dispatchers
            code, folder = kernel.py_func.__code__, Path(kernel.stats.cache_path)
            source = Path(code.co_filename)
            found = folder.glob(f"{source.stem}.{code.co_name}-{code.co_firstlineno}.*.nbi")
            if any(each.stat().st_mtime >= source.stat().st_mtime for each in found):
                return True
    return False
