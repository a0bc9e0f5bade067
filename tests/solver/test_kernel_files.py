"""Kernels on disk, where several processes compile at once: what is found for some types was compiled for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from rotor_solver.jit_policy import compiled
from rotor_solver.kernel_files import VersionFiles, keep_versions_apart
from tests.solver.compiling import kernel_modules, kernels_of


def numba_files(folder: Path, stamp: str = "source") -> Any:
    return IndexDataCacheFile(str(folder), "kernel", stamp)


def version_files(folder: Path, stamp: str = "source") -> Any:
    return VersionFiles(str(folder), "kernel", stamp)


def save_at_once(one: Any, other: Any) -> None:
    """Another process has looked into the index before `one` says what it takes, and is done before `one` is."""
    one_writes, index_before = one._save_data, other._load_index()
    other._load_index = lambda: index_before

    def written_late(name: str, data: str) -> None:
        other.save("types of the other", "code of the other")
        one_writes(name, data)

    one._save_data = written_late
    one.save("types of one", "code of one")


def test_versions_compiled_at_once_are_found_under_their_own_types(tmp_path: Path) -> None:
    save_at_once(version_files(tmp_path), version_files(tmp_path))
    assert version_files(tmp_path).load("types of one") == "code of one"
    assert version_files(tmp_path).load("types of the other") in ("code of the other", None)


def test_numba_by_itself_finds_the_code_of_another_version(tmp_path: Path) -> None:
    """Why there is a file for this. Where it fails, Numba has mended it, and the file can go."""
    save_at_once(numba_files(tmp_path), numba_files(tmp_path))
    assert numba_files(tmp_path).load("types of the other") == "code of one"


def test_a_file_is_there_before_the_index_names_it(tmp_path: Path) -> None:
    """Else another process reads what an older source has left under that name."""
    version_files(tmp_path, "old").save("types", "old code")
    new, found = version_files(tmp_path, "new"), []
    write = new._save_data

    def watched(name: str, data: str) -> None:
        found.append(version_files(tmp_path, "new").load("types"))
        write(name, data)

    new._save_data = watched
    new.save("types", "new code")
    assert found == [None]
    assert version_files(tmp_path, "new").load("types") == "new code"


def test_a_process_with_an_older_source_does_not_write_into_the_files_of_the_new_one(tmp_path: Path) -> None:
    old = version_files(tmp_path, "old")
    version_files(tmp_path, "new").save("types", "new code")
    old._save_index = lambda index: None
    old.save("types", "old code")
    assert version_files(tmp_path, "new").load("types") == "new code"


def test_all_kernels_keep_their_versions_so() -> None:
    kernels = [each for module in kernel_modules() for each in kernels_of(module)]
    assert all(isinstance(each._cache._cache_file, VersionFiles) for each in kernels)


def test_what_is_kept_is_loaded_for_its_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def doubled(values):  # type: ignore[no-untyped-def]  # Numba's types
        return 2 * values[0]

    first = compiled()(doubled)
    for dtype in (np.float32, np.float64, np.int64):
        assert first(np.array([3], dtype)) == 6
    again = compiled()(doubled)
    for dtype in (np.int64, np.float64, np.float32):
        assert again(np.array([4], dtype)) == 8
    assert sum(again.stats.cache_hits.values()) == 3
    assert len(list(tmp_path.rglob("*.nbc"))) == 3


def test_a_kernel_that_numba_does_not_keep_stays_as_it_is() -> None:
    kernel = numba.njit(lambda value: value + 1)
    keep_versions_apart(kernel)
    keep_versions_apart(len)  # with NUMBA_DISABLE_JIT, functions stay plain
    assert kernel(1) == 2
