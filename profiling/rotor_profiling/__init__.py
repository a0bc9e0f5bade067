"""Measure the seconds and bytes of a model's stages on CPU and CUDA, without changing the model."""

from rotor_profiling.backends import memory_meter
from rotor_profiling.isolate import RandomState, buffers_kept, isolated
from rotor_profiling.loss import LossCost, UnusableLossError, has_loss, measure_loss
from rotor_profiling.memory import Phase
from rotor_profiling.optimizer import OptimizerCost, UnknownOptimizerError, optimizer_cost, together
from rotor_profiling.stage.cost import StageBytes, StageCost, loss_layouts, measure_ways, stage_layouts
from rotor_profiling.stage.gradients import Layouts, StageContext, leaves_of
from rotor_profiling.stage.seconds import time_ways
from rotor_profiling.stage.stage_signature import stage_signature, value_signature
from rotor_profiling.step import StepWatch, measured_peak, measured_phases, watch_step
from rotor_profiling.storage import bytes_like, storage_bytes, storages, tensors_in, view_bytes

__all__ = [
    "Layouts",
    "LossCost",
    "OptimizerCost",
    "Phase",
    "RandomState",
    "StageBytes",
    "StageContext",
    "StageCost",
    "StepWatch",
    "UnknownOptimizerError",
    "UnusableLossError",
    "buffers_kept",
    "bytes_like",
    "has_loss",
    "isolated",
    "leaves_of",
    "loss_layouts",
    "measure_loss",
    "measure_ways",
    "measured_peak",
    "measured_phases",
    "memory_meter",
    "optimizer_cost",
    "stage_layouts",
    "stage_signature",
    "storage_bytes",
    "storages",
    "tensors_in",
    "time_ways",
    "together",
    "value_signature",
    "view_bytes",
    "watch_step",
]
