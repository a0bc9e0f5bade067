"""Tests that draw their examples draw the same ones at every run, unless told `--hypothesis-profile=explore`.

Where several processes share the tests (`-n 2`), each has one thread: threads that outnumber cores wait for each other.
Tests that are not marked `gpu` are about the CPU, on machines with CUDA devices as well.
They take a file at a time (`--dist loadfile`), or one of `FOLDERS`, in the order of collection: what takes longest
begins first, so that no process is left with it when the others are done.
"""

import gc
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is there, and for what tests start
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # see docs/limit.md: peaks are exact with it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else sums are in no fixed order
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else Inductor compiles three programs to see what the CPU can

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.quick import time_no_guards, time_stages_once

# How fast examples are drawn says how busy the machine is.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")

FOLDERS = ("tests/distributed/", "tests/compile/")
"""What several processes that train together import, and Inductor's stages, take seconds: one process has them all."""
LONGEST = """
distributed/test_fsdp.py compile/test_whole.py docs/test_pages.py capture/test_masks.py training/test_any_step.py
estimation/test_benchmarks.py estimation/test_sharded.py integrations/test_trainer.py capture/test_partial_saving.py
integrations/test_adapters.py training/test_offload.py cli/test_device.py capture/test_odd_models.py
execute/test_guarded_tape.py checkpointable/test_memory.py training/test_inside_regions.py execute/test_bit_for_bit.py
solver/persistent/test_table.py plan/test_forwards.py plan/test_watched_steps.py batch_size/test_choose.py
cli/test_script.py training/test_faults.py training/test_step_in_backward.py stage/test_kept_steps.py
capture/test_session.py solver/test_classic.py estimation/test_chain.py capture/test_model_state.py
estimation/test_reservation.py estimation/test_estimate.py plan/test_out_of_memory.py
"""
"""Files of ten seconds and more, the longest first."""


# A job in the background of a shell ignores Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes share the tests, none of them waits for kernels that another one compiles as well."""
    # TorchDynamo looks at the gradients of tensors that are no leaves.
    config.addinivalue_line("filterwarnings", "ignore:The .grad attribute of a Tensor:UserWarning:torch")
    if "PYTEST_XDIST_WORKER" in os.environ or not getattr(config.option, "numprocesses", None):
        return
    config.option.loadscopereorder = False  # else files with many tests come first, whatever they take
    path = os.pathsep.join(str(config.rootpath / folder) for folder in (".", "solver"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.solver.compiling"]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((each for each in FOLDERS if nodeid.startswith(each)), super()._split_scope(nodeid))

    return ByFileOrFolder(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test begins with the same random stream, whichever tests came before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def stages_timed_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("timed") is None:
        time_stages_once(monkeypatch)


@pytest.fixture(autouse=True)
def objects_are_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_freeze` has put them there. To count them takes 40 milliseconds, whenever something is measured."""
    monkeypatch.setattr("rotor_py.measure.planning_lock.gc", SimpleNamespace(get_freeze_count=lambda: 1))


_cache_folders = itertools.count()


@pytest.fixture(autouse=True)
def measured_anew(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one has measured, nor does a process that it starts."""
    folder = tmp_path_factory.getbasetemp() / f"cache {next(_cache_folders)}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(autouse=True)
def without_cuda_unless_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the test nor a process that it starts finds a CUDA device."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def any_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any way to store a stage may be chosen, also one that was no faster than another that could stand for it."""
    monkeypatch.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are for a disk so fast that moving always pays: what a test plans does not depend on this machine's."""
    monkeypatch.setattr("rotor_py.offload.open_tier.measure_bandwidth", lambda *_: 1e13)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Any]:
    from rotor_py.offload.file_tier import FileTier

    with closing(FileTier(tmp_path)) as found:
        yield found


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.distributed.processes import Processes

    with Processes(2, tmp_path_factory.mktemp("two") / "meeting") as found:
        yield found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    rank = {os.path.join(here, *name.split("/")): number for number, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: rank.get(str(item.path), len(rank)))


def pytest_collection_finish() -> None:
    time_no_guards()
    _freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """What is there now, a million objects of large modules above all, is not looked through by the collector again.

    It took a sixth of the time of tests that capture models.
    """
    gc.collect()
    gc.freeze()
