"""Files with measurements, one for each kind of stage."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rotor_profiling.timing import several_processes
from rotor_py.errors import record_fields
from rotor_py.measure.cache.stable_key import UnstableKeyError, digest_of, environment

_log = logging.getLogger("rotor_py")
_MOST_FILES = 20_000
"""Of a few kilobytes each; above that, the older half is removed."""


def cache_folder() -> Path:
    """Where measurements are kept: `$XDG_CACHE_HOME/rotor_plan`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rotor_plan" / "measurements"


def measurement_cache(device: torch.device, *settings: Hashable) -> MeasurementCache | None:
    """The measurements made on `device` with these `settings`; None where they would not mean the same elsewhere.

    That is so for several processes, which measure together, and inside of a mode that changes what operators do.
    """
    if several_processes() or _get_current_dispatch_mode() is not None:
        return None
    with suppress(OSError, RuntimeError):  # no home directory, or it cannot be written to
        return MeasurementCache(cache_folder(), (environment(device), settings))
    return None


class MeasurementCache:
    """Measurements in `folder` that were made in the same `surroundings`."""

    def __init__(self, folder: Path, surroundings: Hashable) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._surroundings = surroundings

    def find(self, kind: Hashable) -> dict[str, Any] | None:
        """What is kept of a kind of stage; None if nothing is, or it cannot be read."""
        try:
            found = json.loads(self._file(kind).read_text(encoding="utf-8"))
        except (UnstableKeyError, OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def keep(self, kind: Hashable, data: dict[str, Any]) -> None:
        """Keep `data` of a kind of stage, if the kind means the same in other processes, and the disk takes it."""
        try:
            file = self._file(kind)
            # Written beside and moved: another process reads all of it or nothing.
            with NamedTemporaryFile("w", dir=self._folder, suffix=".new", delete=False, encoding="utf-8") as made:
                json.dump(data, made)
            os.replace(made.name, file)
        except UnstableKeyError as error:
            _log.debug("a measurement is not kept: its stage has %s", error, extra=record_fields("not_cached"))
        except OSError as error:
            _log.debug("a measurement is not kept: %s", error, extra=record_fields("not_cached"))

    def make_room(self) -> None:
        """Remove the older half of the files if there are very many."""
        with suppress(OSError):
            files = list(self._folder.iterdir())
            if len(files) > _MOST_FILES:
                for file in sorted(files, key=lambda each: each.stat().st_mtime)[: len(files) // 2]:
                    file.unlink(missing_ok=True)

    def _file(self, kind: Hashable) -> Path:
        return self._folder / f"{digest_of((self._surroundings, kind))}.json"
