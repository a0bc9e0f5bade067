"""Each private name of torch that the product uses exists, is what the product takes it for, and stands in one file."""

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

from rotor_profiling import torch_compat
from tests.test_architecture import TREES

ATTRIBUTES = {
    "c_autograd": ("_enable_record_function", "_get_sequence_nr"),
    "dynamo_config": ("allow_rnn",),
    "dynamo_registry": ("lookup_backend",),
    "functorch_config": ("activation_memory_budget",),
    "inductor_config": ("triton",),
    "module_hooks": ("_global_forward_hooks", "_global_forward_pre_hooks"),
    "parametrize": ("_cache_enabled", "_cache"),
    "partitioners": ("min_cut_rematerialization_partition",),
}
"""What is read of modules and other objects."""
PARAMETERS = {"tree_map_only": {"func", "tree"}, "tree_unflatten": {"treespec"}, "fx_graph_cse": {"fx_g"}}
"""Parameters that the product passes, of functions written in Python."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when Inductor is imported
@pytest.mark.parametrize("name", sorted(torch_compat.NAMES))
def test_a_private_name_is_what_the_product_takes_it_for(name: str) -> None:
    found = getattr(torch_compat, name)
    assert all(hasattr(found, attribute) for attribute in ATTRIBUTES.get(name, ()))
    assert name not in PARAMETERS or PARAMETERS[name] <= inspect.signature(found).parameters.keys()


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


def test_private_names_of_torch_stand_in_one_file_and_an_unknown_one_is_an_attribute_error() -> None:
    for module, tree in TREES.items():
        if module != "rotor_profiling.torch_compat":
            assert not list(private_uses(tree)), module
    with pytest.raises(AttributeError):
        torch_compat.no_such_name  # noqa: B018  # read for its error
