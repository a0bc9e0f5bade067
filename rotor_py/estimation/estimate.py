"""`estimate`: plan a training step for a device that is not present, and predict its memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from rotor_py.checkpointable import Checkpointable
from rotor_py.data_sheet import Device, Devices
from rotor_py.errors import UnsupportedModelError, what_it_is
from rotor_py.estimation.cuda_autocast import region
from rotor_py.estimation.device_table import devices_of
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_py.estimation.simulated_target import Shard, SimulatedDevices
from rotor_py.plan.step_spec import arguments_of
from rotor_py.report import Report
from rotor_py.stage.replayed_routing import streams_kept
from rotor_py.stage.user_state import user_state_kept


def recurrent_layers(model: nn.Module, device: Device) -> tuple[str, ...]:
    """Return the names of recurrent layers, for which a GPU's libraries save other bytes; () if `device` is a CPU."""
    found = model.named_modules() if device.vendor != "cpu" else ()
    return tuple(name or type(each).__name__ for name, each in found if isinstance(each, nn.RNNBase | nn.RNNCellBase))


def estimate(
    model: nn.Module | Callable[[], nn.Module],
    sample: Any,
    device: str | Device | Devices = "h100",
    *,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    mem_limit: float | str | None = None,
    fresh_grads: bool = False,
    mem_slots: int = 500,
    shard: Shard | None = None,
    precision: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    offload: Literal["host"] | None = None,
) -> Report:
    """Predict memory and time of a training step of `model` on `device`, which need not be present, and plan it.

    Runs the step on fake tensors: no kernel runs, and parameters, activations and optimizer state take no memory, so
    the model may exceed this machine's. Bytes of tensors are exact, peaks are predicted, and seconds rest on
    assumptions that the report names.

    Args:
        model: any model, which stays unchanged and may be on the meta device; or a function that makes one, which is
            called in a context in which parameters take no memory.
        sample: input of the model: a tensor, a tuple of positional or a dict of keyword arguments. Only shapes,
            dtypes and scalars are used. An attention mask is assumed to mask nothing.
        device: a name in the device table (`rotor_py/estimation/devices.toml`), or a `Device`. "h100:8" is eight
            devices that shard the parameters by `fully_shard`; the report is about one, whose batch is `sample`.
        optimizer: the model's optimizer, or a function of the parameters that makes one, such as `torch.optim.AdamW`.
        loss: a function that returns the loss of an output, whose tensors are fake and on the CPU.
        mem_limit: limit of a whole step's peak: bytes, "60GB", "80%". None is 90 % of the memory available to PyTorch,
            or less if the allocator would reserve more than the device has.
        fresh_grads: whether gradients are freed between steps (`zero_grad(set_to_none=True)`).
        mem_slots: least number of units into which the solver divides memory; more find better plans, but slower.
        shard: how parameters are sharded over several devices. "blocks", the default, gathers each layer of a list of
            similar layers separately, and other parameters together; "whole" gathers all at once. Or a function of the
            model and the mesh that calls `fully_shard`.
        precision: dtype in which parameters are gathered and layers run, for "blocks" and "whole".
        offload: "host": activations may be offloaded to host memory, at the table's bandwidth to the host (`pcie`).
        autocast: dtype of `torch.autocast` around forward and loss, by CUDA's rules; None: no autocast.

    Raises:
        InfeasibleError: no plan fits the limit. `min_bytes` is the least limit, or a lower bound of it if the step is
            refused before it is measured.
        UnsupportedModelError: the model cannot be planned, or it reads values of tensors.
        ValueError: the device is not in the table, or `shard` or `precision` is given for a single device.
    """
    devices = devices_of(device)
    target = SimulatedDevices(devices, shard=shard, precision=precision)
    if not isinstance(model, nn.Module):
        with target.making(), torch.random.fork_rng(devices=[]), streams_kept(model):
            model = model()
        if not isinstance(model, nn.Module):
            message = f"the function that makes the model must return a module, got {what_it_is(model)}"
            raise UnsupportedModelError(message, kind="not_a_module", name="model")
    arguments, keywords = arguments_of(sample, model)  # the first batch if `sample` is a DataLoader
    with user_state_kept(model, sample, loss, optimizer), target.together():
        fake = target.model(model).train()
        value = target.fakes.value(keywords or arguments)
        with target.measuring():
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer = target.fakes.optimizer(optimizer)
            elif optimizer is not None:
                optimizer = optimizer(fake.parameters())
            network = Checkpointable(
                fake,
                mem_limit=mem_limit,
                mem_slots=mem_slots,
                loss=loss,
                optimizer=optimizer,
                fresh_grads=fresh_grads,
                cache=False,
                offload=offload,
                watch=False,
            )
            network.refuse_what_cannot_fit(value)
            with region(autocast):
                network.measure(value)
            step = SimulatedStep(network, value, loss, optimizer, fresh_grads=fresh_grads, autocast=autocast)
            target.follow(step)
            network.compute_sequence()
            reserved = target.reserve(step, keep_limit=mem_limit is not None)
            recurrent = recurrent_layers(fake, devices.each)
            report = network.report()
            return replace(report, device=devices.name, predicted_for=devices, recurrent=recurrent, reserved=reserved)
