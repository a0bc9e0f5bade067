"""Options by what people call them elsewhere."""

from __future__ import annotations

import click

_ELSEWHERE = {
    "--mem-limit": ("budget", "memory", "mem", "limit", "memory-limit", "memory-budget", "mem-budget", "max-memory"),
    "--batch": ("batch-size", "bs"),
    "--input": ("shape", "input-shape", "sample"),
    "--max-overhead": ("overhead", "max-slowdown"),
    "--forwards-in-flight": ("in-flight", "forwards"),
    "--save": ("output", "out", "plan"),
    "--device": ("gpu", "cuda"),
}


class CommandWithSynonyms(click.Command):
    """Suggests an option by its meaning; click goes by its letters, and would find --quiet for --budget."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("_", "-")
            meant = next((option for option, others in _ELSEWHERE.items() if name in others), None)
            if meant is None:
                raise
            message = f"No such option {error.option_name!r}. Did you mean {meant!r}?"
            raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None
