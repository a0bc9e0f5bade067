"""Which work is done by compiled kernels, and which by plain Python: whatever is done sooner.

Compiling the kernels takes many seconds, once on a machine; importing Numba and reading them from its cache takes less
than half a second, once in a process. Plain Python and NumPy plan a chain of twenty stages in less than that. How much
a process will have to solve is not known, so this is the question whether to rent or to buy: work is done plainly until
all of it together has taken about as long as the kernels would take to be there. So at most twice the time is spent.

Both ways compute the same numbers, to the last bit: processes that train together need not decide alike. Still it is
decided by estimates of seconds, not by clocks, so that a run does today what it did yesterday.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from rotor_solver.compiled import plain_python
from rotor_solver.progress import watcher

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
