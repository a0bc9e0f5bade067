"""Limits and sizes that say nothing."""

from __future__ import annotations

from rotor_cli.errors import usage
from rotor_cli.request import Request

_SOME_DEVICE = 10**12
"""Bytes. Whether a text is a share of a device can be said before the device is known."""


def refuse_sizes(request: Request) -> None:
    """Failure for a `--mem-limit`, or a `--device-memory`, that is no number of bytes."""
    from rotor_py.units import parse_bytes  # `--help` needs nothing of it

    if request.mem_limit is not None:
        try:
            for limit in request.mem_limit.split(",") if request.pipeline else [request.mem_limit]:  # one for each rank
                parse_bytes(limit, device_bytes=_SOME_DEVICE)
        except ValueError as error:
            raise usage(f"--mem-limit: {error}") from error
    if request.device_memory is not None:
        try:
            parse_bytes(request.device_memory)
        except ValueError as error:
            raise usage(f"--device-memory: {error}") from error
