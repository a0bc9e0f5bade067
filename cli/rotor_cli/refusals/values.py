"""Options whose texts name nothing: told by the texts alone, or by what the files of torch name."""

from __future__ import annotations

from pathlib import Path

from rotor_cli.errors import usage
from rotor_cli.loading.torch_names import arguments_of, optimizers
from rotor_cli.loading.values import autocast_dtype, configuration, floating_dtype, optimizer_and_options, shape_of
from rotor_cli.request import Request


def refuse_values(request: Request) -> None:
    """Failure for a batch without samples, and for a shape, dtype, optimizer, configuration, tier or file of a device
    that there is not.
    """
    if request.batch_size is not None and request.batch_size < 1:
        raise usage(f"--batch is {request.batch_size}; a batch has at least one sample")
    if request.shape:
        shape_of(request.shape)
    if request.dtype is not None:
        floating_dtype(request.dtype, "--dtype")
    if request.precision is not None:
        floating_dtype(request.precision, "--precision")
    if request.autocast is not None:
        autocast_dtype(request.autocast)
    if request.optimizer is not None and (known := optimizers()):
        optimizer_and_options(request.optimizer, known, arguments_of)
    configuration(request.config)
    _refuse_offload(request.offload)
    _refuse_device_file(request.device_file)


def _refuse_offload(tier: str | None) -> None:
    if tier is None:
        return
    from rotor_py.offload import refuse_other_names  # `--help` needs nothing of rotor_py

    try:
        refuse_other_names(tier)
    except ValueError as error:
        raise usage(f"--offload: {error}") from error


def _refuse_device_file(file: str | None) -> None:
    if file is None:
        return
    from rotor_py.devices.names import tables_in

    try:
        tables_in(Path(file))
    except (OSError, ValueError) as error:
        raise usage(f"--device-file: {error}") from error
