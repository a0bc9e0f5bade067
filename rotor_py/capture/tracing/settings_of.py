"""Settings of torch, changed for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def settings_of(config: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Have settings of torch in this thread as they are here, as long as this context lasts.

    `config.patch` makes a class and a context variable at every call. That takes longer than a small layer does, and
    the variables stay in memory for good: Python keeps them in the context that they were set in.
    """
    before = [(name, getattr(config, name)) for name in settings]
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before:
            setattr(config, name, value)
