"""Sizes as people write them."""

from __future__ import annotations

import pytest

from rotor_py import parse_bytes


@pytest.mark.parametrize(
    ("size", "found"),
    [
        ("4GB", 4 * 10**9),
        ("1.5e3 kB", 1_500_000),
        ("512MiB", 512 * 2**20),
        (1e9, 10**9),
        (123.9, 123),
        ("7", 7),
        ("22_007_619", 22_007_619),
    ],
)
def test_texts_and_numbers_are_sizes(size: float | str, found: int) -> None:
    assert parse_bytes(size) == found


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (float("nan"), "nan is not a size"),
        (float("inf"), "inf is more than any device has"),
        (2**63, "more than any device has"),
        ("1e400GB", "more than any device has"),
        ("1e999999999999GB", "more than any device has"),
        (-1.0, "more than zero"),
        ("22__007", "is not a size"),
        ("_7", "is not a size"),
        ("0GB", "more than zero"),
        (True, "True is not a size"),
    ],
)
def test_what_is_no_size_is_refused_in_one_sentence(size: float | str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_bytes(size)
