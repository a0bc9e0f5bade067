"""The machine that one is on, measured, and the file that comes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import rotor_cli.target_device as command
from rotor_cli.main import main
from rotor_py.estimation.calibration import Sizes, as_toml, calibrate
from rotor_py.estimation.device_table import device_from_file, find_device

TINY = Sizes(
    matrices=((64, 64, 64), (64, 32, 128)), attention=(1, 2, 32, 16), convolution=(1, 4, 8), copied_bytes=2**16
)
CPU = torch.device("cpu")


def test_the_file_of_a_measured_device_is_that_device_and_its_numbers_can_be_divided_by(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    found = calibrate(CPU, 16 * 10**9, sizes=TINY)
    path.write_text(as_toml("mine", found))
    assert replace(device_from_file(path), sources=()) == found
    assert (found.memory_bytes, found.usable_bytes) == (16 * 10**9, 16 * 10**9)
    rates, known = found.rates, found.efficiencies
    numbers = [rates.bf16, rates.fp16, rates.tf32, rates.fp32, found.bandwidth, found.pcie_bandwidth]
    numbers += [known.matmul, known.convolution, known.attention, known.attention_backward, known.streaming]
    assert all(math.isfinite(each) and each > 0 for each in numbers)
    assert max(known.matmul, known.streaming) <= 1
    assert found.efficiencies.anchor == f"measured on this CPU with torch {torch.__version__}"


def test_a_device_of_the_table_survives_its_file_too(tmp_path: Path) -> None:
    path = tmp_path / "h100.toml"
    device = replace(find_device("h100"), name='my "own"')
    path.write_text(as_toml("h100", device))
    assert replace(device_from_file(path), sources=()) == replace(device, sources=())


def test_measuring_leaves_random_numbers_and_precision_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    precision = torch.get_float32_matmul_precision()
    torch.manual_seed(3)
    said: list[str] = []
    calibrate(CPU, 10**9, sizes=TINY, progress=said.append)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_float32_matmul_precision() == precision
    assert said == ["matrix products", "attention", "a convolution", "copies"]


def test_the_command_needs_no_model_and_prints_the_file_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "calibrate", lambda device, size, progress: calibrate(device, size, sizes=TINY))
    result = CliRunner().invoke(main, ["--calibrate", "cpu"])
    assert result.exit_code == 0
    path = tmp_path / "mine.toml"
    path.write_text(result.stdout)
    assert device_from_file(path).name == "CPU"


def test_the_command_refuses_what_is_no_device() -> None:
    result = CliRunner().invoke(main, ["--calibrate", "model.py"])
    assert result.exit_code == 2
    assert "--calibrate measures cpu, cuda or cuda:N, not 'model.py'" in result.stderr


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
