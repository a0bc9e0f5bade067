"""What excludes that the batch is chosen (`--batch max`, `--batch best`), and what is about that alone."""

from __future__ import annotations

from rotor_cli.errors import usage
from rotor_cli.request import Request


def refuse_batch(request: Request) -> None:
    """Failure for options that go together with a batch that is chosen only, or with any other only."""
    aim, effective, multiple = request.batch_aim, request.grad_accumulation, request.batch_multiple
    if aim is None:
        for name, given in (("--batch-multiple", multiple != 1), ("--grad-accumulation", effective is not None)):
            if given:
                raise usage(f"{name} is about a batch that is chosen; add --batch max or --batch best")
        return
    if request.max_overhead is not None:
        raise usage(f"--batch {aim} looks for a batch inside a limit; give --mem-limit instead of --max-overhead")
    if request.compile:
        raise usage(
            f"--batch {aim} looks at plain stages; leave out --compile, and plan with it for the batch that it finds"
        )
    if effective is None:
        return
    if request.fresh_grads:
        raise usage(
            "--fresh-grads frees gradients between batches, and --grad-accumulation adds them up over several; "
            "leave one of them out"
        )
    if effective % multiple:
        raise usage(
            f"no multiple of {multiple} divides {effective}, so batches of one size cannot make it; give "
            f"--grad-accumulation a multiple of {multiple}"
        )
