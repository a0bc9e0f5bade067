"""Compile the solver's kernels, and choose between compiled kernels and plain Python.

Loading kernels takes less than half a second in each process, compiling them many seconds, once on a machine. Plain
Python plans twenty stages in less. The total work is unknown beforehand (the rent-or-buy problem): work runs plainly
until its total reaches the time that the kernels would take, so at most twice the time is spent. Both ways compute the
same bits. The decision uses estimated seconds, not clocks, so that runs repeat.

Import kernel files through `kernels_for` only, which keeps imports fast. Numba's disk cache is keyed on a kernel's own
file. Hence a kernel calls only kernels of its own file, and uses only constants of its own file, even if a small
function then stands in two files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast

from rotor_solver.progress import watcher

F = TypeVar("F", bound=Callable[..., Any])

_plain: ContextVar[bool] = ContextVar("plain", default=False)
"""Whether the file that is being imported stays plain Python."""


def compiled(parallel: bool = False, makes_arrays: bool = False) -> Callable[[F], F]:
    """Compile a kernel on its first call, and cache it on disk.

    No `fastmath`: lower bounds are certified up to rounding errors, so sums must not be rearranged. Kernels release the
    GIL. `parallel` makes `prange` use all cores.

    Set `makes_arrays` for kernels that create arrays or lists, or call others that do. All others skip reference
    counting: its atomic operations, several for every pair of rows, took longer than some of the sums.
    """
    if _plain.get():
        return lambda function: function
    import numba
    from numba.core import options

    from rotor_solver.kernel_files import keep_versions_apart

    if parallel:
        start_threads()
    # `_nrt` is a private option. A Numba without it counts references, which is slower and just as correct.
    uncounted = hasattr(getattr(options, "DefaultOptions", None), "_nrt")
    more: dict[str, Any] = {"_nrt": parallel or makes_arrays} if uncounted else {}
    compile_when_called = numba.njit(cache=True, parallel=parallel, nogil=True, **more)

    def kept(function: F) -> F:
        kernel = compile_when_called(function)
        keep_versions_apart(kernel)
        return cast(F, kernel)

    return kept


def __getattr__(name: str) -> Any:
    """Return `prange`: Numba's, or `range` where a file stays plain Python."""
    if name != "prange":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _plain.get():
        return range
    from numba import prange

    return prange


@cache
def plain_python(name: str) -> ModuleType:
    """Import the kernel file `name` as a module of plain Python functions, without Numba."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module, token = module_from_spec(spec), _plain.set(True)
    try:
        spec.loader.exec_module(module)
    finally:
        _plain.reset(token)
    return module


@cache
def start_threads() -> None:
    """Start Numba's threads, once, from a thread that ends right after.

    Starting them sets OpenMP's number of threads for the calling thread, PyTorch's operators included: these would then
    split their sums differently, and change the last digits of a model in training.
    """
    import numba

    starter = Thread(target=numba.get_num_threads)
    starter.start()
    starter.join()


PREPARING = "(preparing the solver, once on this machine)"
"""Progress text while kernels are compiled."""

_IMPORTING = 0.3
"""Seconds of plain work before Numba is imported. Not measured; a wrong value wastes about as many seconds."""
_COMPILING = 4.0
"""Seconds of plain work before kernels are compiled. Compiling takes longer, 10 to 20 seconds, but so much work makes
more work likely. Not measured; a wrong value wastes seconds, once on a machine."""


class _Pace:
    spent = 0.0
    """Seconds of plain work."""
    compiled: ClassVar[set[str]] = set()
    """Files whose kernels are used from now on."""


def kernels_for(name: str, seconds: float) -> ModuleType:
    """Return the kernel file `name` for work of `seconds` in plain Python: compiled, or as plain Python."""
    return import_module(name) if compiling_pays(name, seconds) else plain_python(name)


def compiling_pays(name: str, seconds: float) -> bool:
    """Decide whether to use the compiled kernels of the file `name`. If not, add `seconds` to the plain work."""
    if name in _Pace.compiled:
        return True
    spent = _Pace.spent + seconds
    if spent <= _IMPORTING or (spent <= _COMPILING and not on_disk(import_module(name))):
        _Pace.spent = spent
        return False
    _Pace.compiled.add(name)
    if not on_disk(import_module(name)):
        _tell()
    return True


def prepare(kernel: Any, *arguments: Any) -> None:
    """If progress is watched, compile a kernel for these arguments before progress of its work is reported."""
    if watcher() is None or not hasattr(kernel, "overloads"):  # none with NUMBA_DISABLE_JIT
        return
    from numba import typeof

    types = tuple(map(typeof, arguments))
    if types not in kernel.overloads:
        if not _kept(kernel):
            _tell()
        kernel.compile(types)


def _tell() -> None:
    progress = watcher()
    if progress is not None:
        progress(0, 0, PREPARING)


def on_disk(module: ModuleType) -> bool:
    """Whether Numba's cache has a kernel of this file, newer than the file. Numba itself checks more closely."""
    return any(map(_kept, vars(module).values()))


def _kept(kernel: Any) -> bool:
    folder = getattr(getattr(kernel, "stats", None), "cache_path", None)  # of Numba's dispatchers
    if folder is None:
        return False
    code = kernel.py_func.__code__
    source = Path(code.co_filename)
    found = Path(folder).glob(f"{source.stem}.{code.co_name}-{code.co_firstlineno}.*.nbi")
    return any(each.stat().st_mtime >= source.stat().st_mtime for each in found)
