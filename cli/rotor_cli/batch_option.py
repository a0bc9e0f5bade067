"""What `--batch` takes: a number of samples, or how the batch is to be chosen."""

from __future__ import annotations

from typing import Any

import click


class BatchSize(click.ParamType):
    """A number, `max` or `best`."""

    name = "batch"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int) or value in ("max", "best"):
            return value  # type: ignore[no-any-return] # an int or a text, as was just seen
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is no number of samples, and neither 'max' nor 'best'", param, ctx)
