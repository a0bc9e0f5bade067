"""Limits as bytes of a device."""

from __future__ import annotations

from typing import Any

import torch

from rotor_py.measure.device import limit_bytes, total_bytes
from tests.fields import logged

CPU = torch.device("cpu")


def test_a_limit_above_all_memory_of_the_device_is_told_once(caplog: Any) -> None:
    total = total_bytes(CPU)
    assert limit_bytes(total, CPU) == total
    assert not caplog.text
    for _ in range(2):
        assert limit_bytes(total + 12345, CPU) == total + 12345
    assert len(logged(caplog, "limit_above_device")) == 1
