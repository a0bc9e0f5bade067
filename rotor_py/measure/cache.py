"""Cache measured bytes and seconds of stages on disk, so that later processes need not measure equal stages."""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import math
import operator
import os
import platform
import sys
import sysconfig
import time
import types
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib.metadata import distributions
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any

import torch

from rotor_profiling import StageBytes, timing, torch_compat
from rotor_profiling.stage.seconds import StageRun
from rotor_profiling.stage.stage_signature import Unlike
from rotor_profiling.timing import several_processes
from rotor_profiling.torch_compat import current_dispatch_mode
from rotor_py.errors import record_fields

_log = logging.getLogger("rotor_py")


@dataclass(frozen=True, slots=True)
class StageFindings:
    """Measured `bytes` of a stage: first with everything stored, then in each storage mode of `ways`.

    `decided_bytes`: bytes of its recorded decisions, such as which expert gets a token. `undecided`: whether it makes
    none, so that runs need not record them. `moving`: indices of the buffers that its forward changes.
    """

    bytes: tuple[StageBytes, ...]
    decided_bytes: int
    moving: frozenset[int]
    ways: tuple[str, ...] = ()
    undecided: bool = False


Runs = Sequence[StageRun]
# Time of this module's import. A file that is written later may differ from the code that this process has imported.
_STARTED = time.time()
# Packages of this project. `environment` reads the files of the two that measure.
_OURS = frozenset({"rotor_py", "rotor_profiling", "rotor_solver", "rotor_cli"})
_LIBRARY_FOLDERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def code_of(kind: type) -> str | None:
    """Return a digest of the code that a class may run: the user's imported files, and the libraries' versions.

    Returns None for a class defined in a function or a notebook, and if a file was written after `_STARTED`.
    """
    module = sys.modules.get(kind.__module__)
    if module is None or "<locals>" in kind.__qualname__ or not isinstance(getattr(module, "__file__", None), str):
        return None
    return _digest(len(sys.modules), int(time.monotonic()))


@lru_cache(maxsize=1)  # called for every layer: read the files once a second, and after each import
def _digest(_modules: int, _second: int) -> str | None:
    found = hashlib.sha256(_installed().encode())
    for file in sorted({file for each in list(sys.modules.values()) if (file := _users_file(each)) is not None}):
        try:
            if file.stat().st_mtime > _STARTED:
                return None
            content = file.read_bytes()
        except OSError:
            return None
        found.update(f"\n{file.name} {len(content)}\n".encode() + content)
    return found.hexdigest()


@cache
def _installed() -> str:
    """Return names and versions of all installed libraries, as measuring may import further ones."""
    return " ".join(sorted(f"{each.name} {each.version}" for each in distributions()))


def _users_file(module: ModuleType) -> Path | None:
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(file, str) or file.startswith(_LIBRARY_FOLDERS) or name.partition(".")[0] in _OURS:
        return None
    return None if name.startswith("torch.") else Path(file)  # `__file__` of some of torch's modules does not exist


# Prefixes of modules of rotor_py whose classes need no digest of code: a stage's signature describes them completely.
_OWN_TYPES = ("rotor_py.capture.graph.", "rotor_py.models.")
# Prefixes of modules whose functions and classes change only with the version of torch or Python.
_LIBRARIES = ("torch.", "_operator.", "math.", "builtins.")
_NAMESPACES = ("aten", "prims")


class UnstableKeyError(Exception):
    """Raised for a key that other processes cannot use: it has an object without a name or value that they share."""


def digest_of(key: Hashable) -> str:
    """Return a digest that equal keys have in all processes. Raises UnstableKeyError for a key that has none."""
    return hashlib.sha256(_text(key).encode()).hexdigest()


def environment(device: torch.device) -> tuple[Hashable, ...]:
    """Return a key of all else on which times and bytes of a stage depend: versions, the device, settings of torch."""
    cuda = device.type == "cuda"
    autocast = tuple(
        (kind, str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None)
        for kind in ("cpu", "cuda")
    )
    return (
        torch.__version__,
        platform.python_version(),
        code_digest(Path(__file__).parents[1], Path(timing.__file__).parent),
        torch.cuda.get_device_name(device) if cuda else _processor(),
        tuple(map(repr, torch_compat.settings_now())),
        torch.backends.mkldnn.is_available(),
        tuple(
            os.environ.get(name)
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
        ),
        autocast,
    )


@cache
def code_digest(*folders: Path) -> str:
    """Return a digest of the code in `folders`."""
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _processor() -> str:
    try:
        return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _text(value: Any) -> str:
    if isinstance(value, Unlike):
        raise UnstableKeyError("its stage has an object that can only be compared by identity")
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if value is None or value is Ellipsis or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step))}"
    if isinstance(value, torch_compat.OpOverload | torch_compat.OpOverloadPacket):
        if str(value).partition(".")[0] not in _NAMESPACES:
            raise UnstableKeyError(f"its stage has the operator {value}")
        return f"operator {value}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType):
        return _name(value)
    raise UnstableKeyError(f"its stage has a {type(value).__name__}")


def _name(value: Any) -> str:
    owner = getattr(value, "__self__", None)
    # Many functions of torch are methods of a class in C, and have no `__module__`.
    module = getattr(value, "__module__", None) or getattr(owner, "__module__", None) or ""
    name = getattr(value, "__qualname__", "")
    path = f"{module}.{name}"
    if isinstance(value, types.FunctionType) and (value.__closure__ or "<" in name):
        raise UnstableKeyError(f"its stage has the function {path}, a lambda, a local function or a closure")
    known = path.startswith(_LIBRARIES) or getattr(operator, name, None) is value
    if known or (isinstance(value, type) and path.startswith(_OWN_TYPES)):
        return path
    code = code_of(value) if isinstance(value, type) else None
    if code is None:
        raise UnstableKeyError(f"its stage has {path}, whose code may change")
    return f"{path} of {code}"


# Number of files above which the older half is deleted. A guess: a file has a few kilobytes.
_MOST_FILES = 20_000


def cache_folder() -> Path:
    """Return the folder of cached measurements: `rotor_plan/measurements` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rotor_plan" / "measurements"


def measurement_cache(device: torch.device, *settings: Hashable) -> MeasurementCache | None:
    """Return the cache for `device` and these `settings`; None if it must not or cannot be used."""
    # Several processes must measure the same stages, but may have others on disk. A dispatch mode may change operators.
    if several_processes() or current_dispatch_mode() is not None:
        return None
    with suppress(OSError, RuntimeError):  # no home directory, or not writable
        return MeasurementCache(cache_folder(), (environment(device), settings))
    return None


class MeasurementCache:
    """Bytes and seconds of stages, in files of `folder`, by stage signature and `surroundings` (versions, settings).

    Findings of discovery passes are not cached: whether results depend on recording a graph may depend on the values
    of weights, which a signature does not include.
    """

    def __init__(self, folder: Path, surroundings: Hashable) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._surroundings = surroundings
        with suppress(OSError):
            files = list(folder.iterdir())
            if len(files) > _MOST_FILES:
                for file in sorted(files, key=lambda each: each.stat().st_mtime)[: len(files) // 2]:
                    file.unlink(missing_ok=True)

    def find(self, kind: Hashable) -> tuple[StageFindings, Runs] | None:
        """Return the bytes and seconds for the stage signature `kind`; None if there is no file, or a damaged one."""
        try:
            file = self._file(kind)
            if not file.is_file():  # there is none, or a named pipe, from which a read would not return
                return None
            data = json.loads(file.read_text(encoding="utf-8"))
            return _read(data) if data.pop("digest") == digest_of_data(data) else None
        except (UnstableKeyError, OSError, AttributeError, KeyError, TypeError, ValueError):  # the file was edited
            return None

    def keep(self, kind: Hashable, found: StageFindings, runs: Runs) -> None:
        """Write the file of the stage signature `kind`. If its key is unstable, or the disk fails, log the reason."""
        data = {**asdict(found), "moving": sorted(found.moving), "runs": [asdict(run) for run in runs]}
        try:
            file = self._file(kind)
            # Write a temporary file and rename it, so that other processes read a complete file or none.
            with NamedTemporaryFile("w", dir=self._folder, suffix=".new", delete=False, encoding="utf-8") as made:
                json.dump({**data, "digest": digest_of_data(json.loads(json.dumps(data)))}, made)
            os.replace(made.name, file)
        except (UnstableKeyError, OSError) as error:
            _log.debug("a measurement is not cached: %s", error, extra=record_fields("not_cached"))

    def _file(self, kind: Hashable) -> Path:
        return self._folder / f"{digest_of((self._surroundings, kind))}.json"


def digest_of_data(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _read(data: dict[str, Any]) -> tuple[StageFindings, Runs] | None:
    lists = "gradient_storage_bytes", "view_gradients"
    nbytes = tuple(StageBytes(**way | {name: tuple(way[name]) for name in lists}) for way in data["bytes"])
    ways, moving = tuple(data["ways"]), frozenset(data["moving"])
    runs = [StageRun(tuple(map(tuple, run["ways"])), run["node"] and tuple(run["node"])) for run in data["runs"]]
    if len(nbytes) != 1 + len(ways) or all(run.node is None for run in runs):
        return None  # bytes of the fully stored stage or of a storage mode, or the time as a node, are missing
    if not all(0 <= each < math.inf for run in runs for pair in (*run.ways, run.node or ()) for each in pair):
        return None
    return StageFindings(nbytes, data["decided_bytes"], moving, ways, data["undecided"]), runs
