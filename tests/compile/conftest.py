"""Inductor needs a C++ compiler for the CPU. Without one, stages run as they are, and there is nothing to test."""

import importlib
import warnings

import pytest
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from rotor_py import Checkpointable
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


@pytest.fixture(scope="session")
def _compiled(compiler: None) -> Checkpointable:
    return network()


@pytest.fixture
def compiled(_compiled: Checkpointable) -> Checkpointable:
    """A `Net` whose stages run compiled; compiled once for all tests that do not train it further."""
    run_compiled(_compiled)
    return _compiled
