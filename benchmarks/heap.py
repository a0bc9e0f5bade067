"""Steps that find their memory in the heap: the C library gives none back to the system in between.

By itself, glibc returns free memory from the end of its heap, and takes it again in the next step, page by page.
Whether it does depends on what happens to lie at the end: the same step of a ConvNeXt took no new page or 4600, which
is 6 of 25 ms. And by itself it has memory in pages of 4 KiB, which lie in caches by chance: what one process measures,
the next one may not.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of `mallopt`: how much free memory at the end is returned, and how large a block has to be to be mapped by itself."""
_LARGEST = 2**31 - 1
"""`mallopt` takes an int."""


def keep_free_memory() -> bool:
    """Have the C library keep the memory that is freed from now on; False where it is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _LARGEST)) and bool(mallopt(_MMAP_THRESHOLD, 2**30))


def ask_for_large_pages() -> None:
    """Have processes that begin from now on ask for memory in large pages, where the kernel gives some on request.

    It does where `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`. glibc reads this when a process begins.
    """
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
