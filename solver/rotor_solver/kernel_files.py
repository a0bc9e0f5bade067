"""Where compiled kernels are kept on disk, safe for processes that compile at the same time.

A kernel has a version for each combination of argument types. Numba numbers the files of versions as they come: it
takes a number that its index has free, says so in the index, and writes the file. Two processes that compile different
versions at once can take the same number. From then on, the index may find one version under the types of the other:
machine code for arrays of 64 bits that writes into arrays of 32. Numba has lost kernels of other kinds in the same way
(numba issue 10128).

Here the name of a file says for which types it is, and the file is there before the index names it. Two processes that
write the same file then write the same code, and what is left of the race is an entry that the index may lose, and a
version that is compiled once more.
"""

from __future__ import annotations

import hashlib
from typing import Any

from numba.core import caching


def keep_versions_apart(kernel: Any) -> None:
    """Have the versions of a kernel, `numba.njit(cache=True)`, kept in files that are named after their types.

    With a Numba that keeps them otherwise than those known, or that compiles nothing, the kernel stays as it is.
    """
    files = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
    if type(files) is caching.IndexDataCacheFile and all(hasattr(files, name) for name in _KNOWN):
        files.__class__ = VersionFiles  # Numba offers no way to say which class it should be


_KNOWN = ("_index_name", "_source_stamp", "_load_index", "_save_index", "_save_data")


class VersionFiles(caching.IndexDataCacheFile):
    """The files of one kernel's versions, and the index of them."""

    def _load_index(self: Any) -> Any:
        """The index; empty where it names types that are gone, as one of an older source may."""
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]  # of Numba
        except (ImportError, AttributeError):  # Numba unpickles an index before it compares sources
            return {}

    def save(self: Any, key: Any, data: Any) -> None:
        """Keep a version. `key` has its types, the processor and the code of the function."""
        # With the stamp: processes with an older source must not write into files that the new index names.
        digest = hashlib.sha256(repr((self._source_stamp, key)).encode()).hexdigest()
        name = f"{self._index_name.removesuffix('.nbi')}.{digest[:16]}.nbc"
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})
