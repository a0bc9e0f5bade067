"""Storages that are resized, which no dispatch mode sees.

FSDP lets whole parameters go by making their storage empty, and makes it as large as before to gather them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_RESIZE = "resize_"


@contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `tell` is called with every storage that has been resized. Contexts end in the reverse of their order."""
    before = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = before(storage, size)
        tell(storage)
        return result

    setattr(torch.UntypedStorage, _RESIZE, resize)
    try:
        yield
    finally:
        setattr(torch.UntypedStorage, _RESIZE, before)
