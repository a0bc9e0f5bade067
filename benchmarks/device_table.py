"""The table of devices as one that people read.

python benchmarks/device_table.py            # prints it
python benchmarks/device_table.py --write    # also into docs/benchmarks.md
"""

from __future__ import annotations

import argparse

from report import put

from rotor_py.estimation.device_table import device_names, find_device


def table() -> str:
    lines = [
        "| name | device | memory, GiB | bandwidth, TB/s | bf16 | fp16 | tf32 | fp32 | link, GB/s | efficiencies |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in device_names():
        device = find_device(name)
        rates = (device.rates.bf16, device.rates.fp16, device.rates.tf32, device.rates.fp32)
        lines.append(
            f"| `{name}` | {device.name} | {device.memory_bytes / 2**30:.2f} | {device.bandwidth / 1e12:.2f} "
            f"| {' | '.join(f'{rate / 1e12:g}' for rate in rates)} | {device.link_bandwidth / 1e9:g} "
            f"| {device.efficiencies.origin} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    print(table())
    if parser.parse_args().write:
        put("device-table", table())


if __name__ == "__main__":
    main()
