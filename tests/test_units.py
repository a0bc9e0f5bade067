"""Sizes as people write them."""

import pytest

from rotor_py import parse_bytes
from tests.fields import raises


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
    ("size", "kind"),
    [
        (float("nan"), "not_a_size"),
        (float("inf"), "too_large"),
        (2**63, "too_large"),
        ("1e400GB", "too_large"),
        ("1e999999999999GB", "too_large"),
        (-1.0, "not_positive"),
        ("22__007", "not_a_size"),
        ("_7", "not_a_size"),
        ("0GB", "not_positive"),
        (True, "not_a_size"),
    ],
)
def test_what_is_no_size_is_refused_in_one_sentence(size: float | str, kind: str) -> None:
    with raises(ValueError, kind):
        parse_bytes(size)
