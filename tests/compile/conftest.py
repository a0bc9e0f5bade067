"""Inductor needs a C++ compiler for the CPU. Without one, stages run as they are, and there is nothing to test."""

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch import fx
from torch._dynamo.backends.common import AotAutograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import default_partition
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler

from rotor_py import Checkpointable
from rotor_py.compile import candidates
from tests.compile.network import network, run_compiled


@pytest.fixture(autouse=True, scope="session")
def compiler() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("no C++ compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where a test calls torch.compile itself, torch warns of its own parts
        importlib.import_module("torch._inductor.compile_fx")


@pytest.fixture(autouse=True, scope="module")
def few_candidates() -> Iterator[None]:
    """Fewer partitions are weighed than in earnest: it only makes the steps between them coarser."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "_WORK", 20_000)
        patch.setattr(candidates, "_FEWEST", 8)
        patch.setattr(candidates, "_SLOTS", 60)
        yield


@pytest.fixture(scope="session")
def _compiled(compiler: None) -> Checkpointable:
    return network()


@pytest.fixture
def compiled(_compiled: Checkpointable) -> Checkpointable:
    """A `Net` whose stages run compiled; compiled once for all tests that do not train it further."""
    run_compiled(_compiled)
    return _compiled


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs run their operators one by one: quicker, where a test is not about the code that is made."""

    def compiled(graph: fx.GraphModule, inputs: list[Any], config_patches: dict[str, Any]) -> Any:
        partition, table = config_patches.get("custom_partitioner_fn", default_partition), select_decomp_table()
        options = {"fw_compiler": boxed_nop, "bw_compiler": boxed_nop, "decompositions": table}
        return AotAutograd(**options, partition_fn=partition)(graph, inputs)

    monkeypatch.setattr("rotor_profiling.torch_compat.compile_fx", compiled)
