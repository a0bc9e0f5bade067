"""What excludes that the step is planned for a device that need not be there."""

from __future__ import annotations

from rotor_cli.errors import usage
from rotor_cli.request import HERE, Request


def refuse_device(request: Request) -> None:
    """Failure for a device that there is none of, and for what can only be done on a device that is there."""
    if request.elsewhere:
        _refuse_elsewhere(request, request.device or "")
    several = request.elsewhere and _count(request.device or "") > 1
    if request.precision is not None and not several:
        raise usage("--precision is for parameters that several devices share; write --device h100:8, or --dtype")
    if request.shard is not None and not several:
        raise usage("--shard divides parameters among several devices; write --device h100:8")
    if request.autocast is not None and not request.elsewhere:
        raise usage(
            "--autocast is for a device that need not be here: add --device h100. Here, have the model's forward enter "
            "torch.autocast, or plan the training script itself: rotor-plan train.py --"
        )


def _count(device: str) -> int:
    from rotor_py.devices.names import counted

    try:
        return counted(device)[1]
    except ValueError as error:
        raise usage(f"--device: {error}") from error


def _refuse_elsewhere(request: Request, device: str) -> None:
    if device and request.device_file is None and not HERE.fullmatch(device):
        from rotor_py.devices.names import name_and_count

        try:
            name_and_count(device)
        except ValueError as error:
            raise usage(f"--device: {error}") from error
    if HERE.fullmatch(device):
        raise usage(
            f"--device {device} is a device of this machine; --device-memory and --device-file are about one that "
            "need not be here"
        )
    refused = {
        "--verify": (request.verify, "trains a step on the device"),
        "--compile": (request.compile, "compiles the stages for the device, and measures them there"),
        "--offload": (request.offload not in (None, "host"), "measures how fast a file is beside the device"),
        f"--batch {request.batch_aim}": (
            request.offload is not None and request.batch_aim is not None,
            "with --offload trains steps on the device",
        ),
        "--pipeline": (request.pipeline is not None, "measures a microbatch on the device"),
    }
    for option, (given, does) in refused.items():
        if given:
            raise usage(f"{option} {does}, which is not here; leave out --device {device}".rstrip())
