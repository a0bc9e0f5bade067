"""The table of devices, and files of the same form."""

import sys
from pathlib import Path

import pytest
import torch

from rotor_py.data_sheet import UNANCHORED
from rotor_py.estimation import device_table as table
from rotor_py.estimation.device_table import device_from_file, device_names, find_device
from tests.fields import raises

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(table.__file__).with_name("devices.toml")
OWN = """
[mine]
memory = "24GB"
bandwidth = 9e11
bf16 = 1e14
fp16 = 1e14
tf32 = 5e13
fp32 = 2e13
compute_capability = "8.6"
link = 3e10
pcie = 3e10
"""


def test_every_cell_of_the_table_has_a_source_that_is_written_out() -> None:
    content = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    sources = content.pop("sources")
    used = set()
    for name, cells in content.items():
        for cell, value in cells.items():
            if cell not in ("name", "vendor", "efficiencies"):
                assert value["source"] in sources, (name, cell)
                used.add(value["source"])
    assert used == sources.keys()
    assert all(len(find_device(name).sources) == 9 for name in device_names())


def test_rates_are_dense_also_where_public_tables_are_wrong_and_names_are_found_however_they_are_written() -> None:
    for device in map(find_device, device_names()):
        rates = device.rates
        assert rates.fp16 >= rates.tf32 >= rates.fp32, device.name
        # Per byte of bandwidth: a table that counts sparsity, or takes the wrong memory, leaves this range.
        assert 70 <= rates.fp16 / device.bandwidth <= 450, device.name
        assert device.link_bandwidth >= device.pcie_bandwidth, device.name
        assert device.memory_bytes > device.usable_bytes > 0, device.name
    h100, h200, l4 = find_device("h100"), find_device("h200"), find_device("l4")
    assert h100.rates.bf16 == pytest.approx(1979e12 / 2, rel=1e-3)  # the data sheet's is with sparsity
    assert l4.bandwidth == 300e9  # torch/_inductor/analysis/device_info.py has the H100's
    assert (h200.rates, h200.bandwidth) == (h100.rates, 4.8e12)
    rate = find_device("a100-80").rates.of
    found = rate(torch.bfloat16), rate(torch.float32), rate(torch.float32, tf32=True)
    assert found == (312e12, 19.5e12, 156e12)
    assert find_device("H100") is find_device("nvidia h100") is find_device("h100")
    assert find_device("RTX 4090") is find_device("rtx4090")
    with pytest.raises(ValueError, match="did you mean a100-80 or a100-40"):
        find_device("a100")
    with raises(ValueError, "unknown_device", name="mi300"):
        find_device("mi300")


def test_a_file_of_ones_own_needs_numbers_alone_and_of_several_devices_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    device = device_from_file(path)
    assert (device.name, device.memory_bytes, device.compute_capability) == ("mine", 24 * 10**9, (8, 6))
    assert device.efficiencies is UNANCHORED
    assert dict(device.sources)["bf16"] == "the file itself"
    path.write_text(OWN + OWN.replace("[mine]", "[other]"))
    with raises(ValueError, "which_device"):
        device_from_file(path)
    assert device_from_file(path, "other").name == "other"
    with raises(ValueError, "unknown_device", name="third"):
        device_from_file(path, "third")


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (("bandwidth = 9e11", ""), "missing_fields", "bandwidth"),
        (("bf16 = 1e14", "bf16 = -1"), "not_positive", "bf16"),
        (("pcie = 3e10", "pcie = 3e10\nbf61 = 2"), "unknown_fields", "bf61"),
        (("[mine]", "[mine"), "not_toml", None),
        (("[mine]", ""), "outside_device", None),
        (("memory = \"24GB\"", "memory = \"24 parsecs\""), "unknown_unit", "parsecs"),
        (("memory = \"24GB\"", "memory = \"545259520\""), "no_room", None),
        (("pcie = 3e10", "pcie = 3e10\n[mine.efficiencies]\nmatmul = 0.5"), "missing_fields", None),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_in_one_sentence(tmp_path: Path, change, kind: str, name: str | None) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace(*change))
    with raises(ValueError, kind) as error:
        device_from_file(path)
    assert name in (None, error.value.name)
    assert "mine.toml" in str(error.value)
    assert "\n" not in str(error.value)
