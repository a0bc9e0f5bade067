"""The row of the table of devices that this machine's card has."""

from __future__ import annotations

from rotor_py.data_sheet import Device
from rotor_py.estimation.device_table import device_names, find_device


def device_like(reported: str, memory_bytes: int) -> Device | None:
    """The device of the table that calls itself `reported` (`torch.cuda.get_device_name`) and has that much memory.

    None if there is none: cards of one name and a tenth more or less memory are other cards.
    """
    name = reported.lower().replace(" ", "").replace("-", "")
    found = [
        (len(key.partition("-")[0]), ("pcie" in key) == ("pcie" in name), device)
        for key, device in ((key, find_device(key)) for key in device_names())
        if key.partition("-")[0] in name and abs(device.memory_bytes - memory_bytes) < 0.1 * memory_bytes
    ]
    return max(found, key=lambda each: each[:2], default=(0, False, None))[2]
