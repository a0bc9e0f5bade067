"""Whether this process trains alone."""

from __future__ import annotations

import torch.distributed as dist


def several_processes() -> bool:
    """Whether this process is one of several: they may have to run as often, as a collective waits for all of them."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
