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


_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Of torch.compile. Written down here, since wrong use is answered before torch is loaded."""


class CommandWithSynonyms(click.Command):
    """Suggests an option by its meaning; click goes by its letters, and would find --quiet for --budget."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it. After `--` comes what is a script's. --compile takes no mode, as `torch.compile` does."""
        script: tuple[str, ...] | None = None
        if "--" in args:
            args, script = args[: args.index("--")], tuple(args[args.index("--") + 1 :])
        following = args[args.index("--compile") + 1 :][:1] if "--compile" in args else []
        if following and following[0] in _MODES:
            records = following[0] in _MODES[1:3]
            why = " (this one records CUDA graphs, which no plan can follow)" if records else ""
            raise click.UsageError(
                f"--compile takes no mode{why}, and plans for Inductor's defaults; for another mode, give "
                'Checkpointable compile="max-autotune-no-cudagraphs" in your code.',
                ctx=ctx,
            )
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("_", "-")
            meant = next((option for option, others in _ELSEWHERE.items() if name in others), None)
            if meant is None:
                raise
            message = f"No such option {error.option_name!r}. Did you mean {meant!r}?"
            raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None
        ctx.params["script_arguments"] = script
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """As click has them, and what may follow the options."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]
