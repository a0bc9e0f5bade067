"""Cache compiled kernels on disk, safe for processes that compile at the same time.

Numba takes a free number from its index for the file of each version (combination of argument types). Two processes
that compile different versions at once can take the same number. The index may then return one version for the types of
the other: machine code for arrays of 64 bits that writes into arrays of 32. Numba has lost kernels of other kinds in
the same way (numba issue 10128).

Here a file is named after its types, and written before the index names it. The race can then only lose an index entry,
and that version is compiled once more.
"""

from __future__ import annotations

import hashlib
from typing import Any

from numba.core import caching


def keep_versions_apart(kernel: Any) -> None:
    """Keep the versions of a kernel (`numba.njit(cache=True)`) in files that are named after their types.

    The kernel stays as it is if Numba stores its cache in an unknown way, or compiles nothing.
    """
    files = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
    if type(files) is caching.IndexDataCacheFile and all(hasattr(files, name) for name in _KNOWN):
        files.__class__ = VersionFiles  # Numba offers no way to choose the class


_KNOWN = ("_index_name", "_source_stamp", "_load_index", "_save_index", "_save_data")


class VersionFiles(caching.IndexDataCacheFile):
    """The files of one kernel's versions, and their index."""

    def _load_index(self: Any) -> Any:
        """Return the index; empty if it names types that no longer exist, as an older source's may."""
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]  # of Numba
        except (ImportError, AttributeError):  # Numba unpickles an index before it compares sources
            return {}

    def save(self: Any, key: Any, data: Any) -> None:
        """Store a version. `key` has its types, the processor and the function's code."""
        # With the stamp: processes with an older source must not write into files that the new index names.
        digest = hashlib.sha256(repr((self._source_stamp, key)).encode()).hexdigest()
        name = f"{self._index_name.removesuffix('.nbi')}.{digest[:16]}.nbc"
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})
