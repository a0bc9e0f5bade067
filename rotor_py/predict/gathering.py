"""The stream on which FSDP2 gathers parameters, told to a step that is followed.

The allocator keeps what each stream frees for that stream, so what is gathered apart is also reserved apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rotor_py.devices.followed_step import FollowedStep

_GATHERING = 1


@contextmanager
def gathering_apart(step: FollowedStep) -> Iterator[None]:
    """Inside, what FSDP2 makes to gather parameters is requested on a stream of its own, as on CUDA."""
    group: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if group is None:  # nothing is sharded
        yield
        return
    gather = group.foreach_all_gather

    def gathered(*args: Any, **kwargs: Any) -> Any:
        before, step.stream = step.stream, _GATHERING
        try:
            return gather(*args, **kwargs)
        finally:
            step.stream = before

    group.foreach_all_gather = gathered
    try:
        yield
    finally:
        group.foreach_all_gather = gather
