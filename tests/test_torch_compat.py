"""Each private name of torch that the product uses exists, is what the product takes it for, and stands in one file."""

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

from rotor_profiling import torch_compat
from tests.test_architecture import TREES

CLASSES = {
    "AotAutograd", "AutoDispatchBelowAutograd", "BatchNorm", "CompileContext", "ConstantVariable", "CustomGraphPass",
    "CustomPartitionerFn", "DataDependentOutputException", "DispatchKey", "DispatchKeySet",
    "DynamicOutputShapeException", "ExcludeDispatchKeyGuard", "ExperimentalConfig", "FakeStore", "FakeTensor",
    "FakeTensorMode", "GuardBuilder", "OpOverload", "OpOverloadPacket", "OptimizedModule", "OrderedSet",
    "TorchCompileInductorWrapper", "TorchCompileWrapper", "TorchDispatchMode", "TorchDynamoException",
    "TorchRuntimeError", "TracingContext", "TreeSpec", "Unsupported",
}  # fmt: skip
OBJECTS = {
    "c_autograd": ("_enable_record_function", "_get_sequence_nr"),
    "c_nn": (),
    "dynamo_backends": (),
    "dynamo_builder": (),
    "dynamo_callbacks": (),
    "dynamo_config": ("allow_rnn",),
    "dynamo_registry": ("lookup_backend",),
    "functorch_config": ("activation_memory_budget",),
    "graph_break_reasons": (),
    "graph_compile": (),
    "inductor_config": ("triton",),
    "inductor_exceptions": (),
    "module_hooks": ("_global_forward_hooks", "_global_forward_pre_hooks"),
    "parametrize": ("_cache_enabled", "_cache"),
    "partitioners": ("min_cut_rematerialization_partition",),
}
"""Modules and other objects, with the attributes that are read of them."""
PARAMETERS = {
    "tree_map_only": {"func", "tree"},
    "tree_unflatten": {"treespec"},
    "fx_graph_cse": {"fx_g"},
}
"""Parameters that the product passes, of functions written in Python."""
ONLY_SOME = {"dynamo_backends", "boxed_nop"}
"""Names that not every version of torch has."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when Inductor is imported
@pytest.mark.parametrize("name", sorted(torch_compat.NAMES))
def test_a_private_name_is_what_the_product_takes_it_for(name: str) -> None:
    found = getattr(torch_compat, name)
    if name in CLASSES:
        assert isinstance(found, type)
    elif name in OBJECTS:
        assert all(hasattr(found, attribute) for attribute in OBJECTS[name])
    else:
        assert callable(found)
    if name in PARAMETERS:
        assert PARAMETERS[name] <= inspect.signature(found).parameters.keys()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        torch_compat.no_such_name  # noqa: B018  # read for its error


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Private names of torch that a file imports, or reads by their dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch[\w.]*", name := ast.unparse(node)):
            names = [name]
        else:
            continue
        for name in names:
            first, *parts = name.split(".")
            if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield name


def test_private_names_of_torch_stand_in_one_file() -> None:
    for module, tree in TREES.items():
        if module != "rotor_profiling.torch_compat":
            assert not list(private_uses(tree)), module
