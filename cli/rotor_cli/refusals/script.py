"""What excludes that the file is a training script."""

from __future__ import annotations

from rotor_cli.errors import usage
from rotor_cli.request import Request


def refuse_script(request: Request) -> None:
    """Failure for a file that is no script, and for options that a script decides itself."""
    if not request.explicit_script:
        return
    if not request.model.endswith(".py"):
        raise usage(f"{request.model} is no script, and -- is followed by the arguments of one: train.py -- --epochs 3")
    for name in request.of_model_files:
        raise usage(f"{name} is for a model file; a script decides that itself: give it what it takes after --")
    if request.run and request.verify:
        raise usage("--verify takes steps of its own, and --run lets the script train; leave one of them out")
    if request.run and request.json_file == "-":
        raise usage("with --run, stdout is the script's; give --json the name of a file")
