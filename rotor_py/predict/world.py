"""A group of processes that are not there: this one is the first of them, and collectives send nothing.

PyTorch's own backend "fake" returns from every collective at once, with whatever is in memory. Shapes are all that
counts here, so one process is enough to see what each of any number of them holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rotor_py.errors import UnsupportedModelError


@contextmanager
def world_of(size: int) -> Iterator[DeviceMesh]:
    """Inside, this process is the first of `size` that are not there; gives a mesh of all of them.

    UnsupportedModelError if it is one of several already.
    """
    if not dist.is_available():
        raise UnsupportedModelError(
            "a step of several devices cannot be predicted: this PyTorch was built without torch.distributed",
            kind="no_distributed",
        )
    if dist.is_initialized():
        raise UnsupportedModelError(
            "a step of several devices cannot be predicted in a process that has a process group already; predict it "
            "before init_process_group, or in a process of its own",
            kind="has_process_group",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # has the backend registered

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with unset_fake_temporarily():  # a mesh reads the ranks that it has
            mesh = init_device_mesh("cpu", (size,))
        yield mesh
    finally:
        dist.destroy_process_group()
