"""Choose the source of a model's stages."""

from __future__ import annotations

from torch import nn

from rotor_py.compile.compiled_stage import StageCompiler
from rotor_py.compile.stage_code import Config
from rotor_py.distributed.sharding import gathers_in_another_dtype
from rotor_py.measure.cut import is_chain
from rotor_py.plan.sources.graph_source import GraphSource
from rotor_py.plan.sources.layer_source import LayerSource
from rotor_py.plan.sources.source import Source


def source_of(model: nn.Module, granularity: int, compile: Config | None = None) -> Source:
    """Return layers for a chain of layers: they need no capturing, and have names that a user knows.

    Stages to `compile` with these options of Inductor are always captured. A layer may have side effects, which
    compiling would run only once; TorchDynamo handles them. Models that `fully_shard` gathers in another dtype are
    captured too: hooks cast the inputs of their layers, and are absent while a layer is measured.
    """
    if compile is not None:
        return GraphSource(model, granularity, StageCompiler(compile))
    as_it_stands = is_chain(model) and not gathers_in_another_dtype(model)
    return LayerSource(model) if as_it_stands else GraphSource(model, granularity)
