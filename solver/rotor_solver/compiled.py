"""How the solver's kernels are compiled: one decorator for all of them, and Numba's threads.

Compiling takes long, and so does importing Numba. Files with kernels are imported by `pace` alone, which has small work
done by the same functions as plain Python: `import rotor_solver` and the first plan of a small model stay fast.

Numba's cache on disk is keyed on the file of a kernel, not on the files of what it calls, of the constants that it
uses, or of this decorator. Hence one rule for all files with kernels: a kernel calls only kernels of its own file, and
uses only constants of its own file. Where that takes a small function twice, it stands there twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec, module_from_spec
from threading import Thread
from types import ModuleType
from typing import Any, TypeVar, cast

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

    from rotor_solver.arrays.kernel_files import keep_versions_apart

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
