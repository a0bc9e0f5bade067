"""How the solver's kernels are compiled, and when: one decorator for all of them, and the choice against plain Python.

Importing Numba takes less than half a second, once in a process, and so does reading kernels from its cache. Compiling
them takes many seconds, once on a machine. Plain Python and NumPy plan a chain of twenty stages in less than that. How
much a process will have to solve is not known, so this is the question whether to rent or to buy: work is done plainly
until all of it together has taken about as long as the kernels would take to be there. So at most twice the time is
spent. Both ways compute the same numbers, to the last bit: processes that train together need not decide alike. Still
it is decided by estimates of seconds, not by clocks, so that a run does today what it did yesterday.

Files with kernels are imported through `kernels_for` alone: `import rotor_solver` and the first plan of a small model
stay fast. Numba's cache on disk is keyed on the file of a kernel, not on the files of what it calls, of the constants
that it uses, or of this decorator. Hence one rule for all files with kernels: a kernel calls only kernels of its own
file, and uses only constants of its own file. Where that takes a small function twice, it stands there twice.
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
"""Whether the file that is being imported is to stay plain Python."""


def compiled(parallel: bool = False, makes_arrays: bool = False) -> Callable[[F], F]:
    """Compile a kernel when it is first called, and keep the result on disk.

    Arithmetic is strict (no `fastmath`): lower bounds are certified up to rounding errors, so sums may not be
    rearranged. Kernels let go of Python's lock, so that several threads can solve at once. `parallel` makes `prange`
    use all cores.

    `makes_arrays` is for kernels that create arrays or lists, or call others that do. All others do not count
    references to arrays: a count is an atomic operation on a number that all cores share, and there were several for
    every pair of rows. They took longer than some of the sums.
    """
    if _plain.get():
        return lambda function: function
    import numba
    from numba.core import options

    from rotor_solver.kernel_files import keep_versions_apart

    if parallel:
        start_threads()
    # `_nrt` is a private option. A Numba without it counts references, which is slower and just as right.
    uncounted = hasattr(getattr(options, "DefaultOptions", None), "_nrt")
    more: dict[str, Any] = {"_nrt": parallel or makes_arrays} if uncounted else {}
    compile_when_called = numba.njit(cache=True, parallel=parallel, nogil=True, **more)

    def kept(function: F) -> F:
        kernel = compile_when_called(function)
        keep_versions_apart(kernel)
        return cast(F, kernel)

    return kept


def __getattr__(name: str) -> Any:
    """`prange`: that of Numba, or `range` where a file stays plain Python."""
    if name != "prange":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _plain.get():
        return range
    from numba import prange

    return prange


@cache
def plain_python(name: str) -> ModuleType:
    """The file with kernels that is imported as `name`, as a module of plain Python functions: without Numba."""
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

    Starting them sets how many threads OpenMP uses for whatever the starting thread calls next. PyTorch's operators are
    among that: from the first plan on, they would cut their sums into other parts, and the last digits of a model in
    training would change.
    """
    import numba

    starter = Thread(target=numba.get_num_threads)
    starter.start()
    starter.join()


PREPARING = "(preparing the solver, once on this machine)"
"""What somebody who watches is told while kernels are compiled."""

_IMPORTING = 0.3
"""Seconds of plain work while Numba is not even imported; a guess."""
_COMPILING = 4.0
"""Seconds of plain work while kernels would have to be compiled. That takes longer, 10 to 20 seconds; but
who has solved so much is likely to go on. A guess."""


class _Pace:
    """What this process has done so far."""

    spent = 0.0
    """Seconds of plain work."""
    compiled: ClassVar[set[str]] = set()
    """The files whose kernels are used from now on."""


def kernels_for(name: str, seconds: float) -> ModuleType:
    """The file with kernels `name` for work that would take plain Python `seconds`: compiled, or as plain Python."""
    return import_module(name) if compiling_pays(name, seconds) else plain_python(name)


def compiling_pays(name: str, seconds: float) -> bool:
    """Whether to use the compiled kernels of the file `name`. If not, `seconds` count as work done plainly."""
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
    """Where somebody watches, compile a kernel for such arguments before they are told how far its work is."""
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
    """Whether Numba has kept what it compiled of a file, since the file was changed. Numba itself looks closer."""
    return any(map(_kept, vars(module).values()))


def _kept(kernel: Any) -> bool:
    folder = getattr(getattr(kernel, "stats", None), "cache_path", None)  # of Numba's dispatchers
    if folder is None:
        return False
    code = kernel.py_func.__code__
    source = Path(code.co_filename)
    found = Path(folder).glob(f"{source.stem}.{code.co_name}-{code.co_firstlineno}.*.nbi")
    return any(each.stat().st_mtime >= source.stat().st_mtime for each in found)
