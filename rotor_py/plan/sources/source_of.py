"""Which source the stages of a model come from."""

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
    """Layers where the model is a chain of them: they need no capturing, and have names that a user knows.

    Stages to `compile` with these options of Inductor are captured in any case. A layer is code that may do anything
    beside computing its output, and compiled it would do that once; TorchDynamo sees to it that it is done. So are
    models that `fully_shard` gathers in another dtype: hooks cast what their layers take, and are not there while a
    layer is measured.
    """
    if compile is not None:
        # Here, since most plans do without Inductor.
        from rotor_py.compile.partitioner import StagePartitions

        return GraphSource(model, granularity, StageCompiler(compile, StagePartitions()))
    as_it_stands = is_chain(model) and not gathers_in_another_dtype(model)
    return LayerSource(model) if as_it_stands else GraphSource(model, granularity)
