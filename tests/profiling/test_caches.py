"""What empties caches is as large as they are."""

from pathlib import Path

import pytest

from rotor_profiling import caches


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("48K", "2048K", "32768K"), 32 << 20),
        (("262144K",), 64 << 20),
        ((), 32 << 20),
    ],
)
def test_the_largest_cache_counts(
    sizes: tuple[str, ...], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, size in enumerate(sizes):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        (folder / "size").write_text(size + "\n")
    monkeypatch.setattr(caches, "_FOLDER", tmp_path)
    caches._cache_bytes.cache_clear()
    try:
        assert caches._cache_bytes() == expected
    finally:
        caches._cache_bytes.cache_clear()
