"""This machine as a device, and its file."""

import math
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

import rotor_cli.target_device as command
from rotor_py.estimation.calibration import Sizes, as_toml, calibrate
from rotor_py.estimation.device_table import device_from_file, find_device
from tests.fields import ends, invoke

MATRICES = ((64, 64, 64), (64, 32, 128))
TINY = Sizes(matrices=MATRICES, attention=(1, 2, 32, 16), convolution=(1, 4, 8), copied_bytes=2**16)
CPU = torch.device("cpu")


def test_a_device_survives_its_file_and_measuring_restores_the_random_state(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected, precision = torch.rand(3), torch.get_float32_matmul_precision()
    torch.manual_seed(3)
    said: list[str] = []
    found = calibrate(CPU, 16 * 10**9, sizes=TINY, progress=said.append)
    assert said == ["matrix products", "attention", "a convolution", "copies"]
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_float32_matmul_precision() == precision
    path = tmp_path / "mine.toml"
    for device in (found, replace(find_device("h100"), name='my "own"', sources=())):
        path.write_text(as_toml("mine", device))
        assert replace(device_from_file(path), sources=()) == device
    assert found.memory_bytes == found.usable_bytes == 16 * 10**9
    known = found.efficiencies
    numbers = [*astuple(found.rates), found.bandwidth, found.pcie_bandwidth, known.convolution, known.attention]
    assert all(math.isfinite(each) and each > 0 for each in [*numbers, known.attention_backward])
    assert max(known.matmul, known.streaming) <= 1
    assert known.anchor == f"measured on this CPU with torch {torch.__version__}"


def test_the_command_needs_no_model_and_prints_the_file_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "calibrate", lambda device, size, progress: calibrate(device, size, sizes=TINY))
    result = invoke("--calibrate", "cpu")
    assert result.exit_code == 0
    path = tmp_path / "mine.toml"
    path.write_text(result.stdout)
    assert device_from_file(path).name == "CPU"
    ends(invoke("--calibrate", "model.py"), 2, "unknown_device", name="--calibrate")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_near_its_data_sheet() -> None:
    found = calibrate(torch.device("cuda"), 10**9)
    assert found.rates.bf16 > found.rates.fp32
    known = {"H100": "h100", "H200": "h200", "A100": "a100-80", "L4": "l4"}
    name = next((each for part, each in known.items() if part in found.name.split()), None)
    if name is not None:
        sheet = find_device(name)
        assert 0.4 < found.rates.bf16 / sheet.rates.bf16 < 1.1
        assert 0.5 < found.bandwidth / sheet.bandwidth < 1.05
