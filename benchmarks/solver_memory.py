"""What solving one random chain takes in memory: python benchmarks/solver_memory.py STAGES SHARE

Prints the process's largest resident size in bytes, first with everything loaded and a small chain solved, then after
solving the chain. A process of its own is needed, since that size never shrinks, and one without torch.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from chains import limit_at, random_chain

from rotor_solver import solve

STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """On Linux, ru_maxrss of a process begins at that of the process that started it; VmHWM does not."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    stages, share = int(sys.argv[1]), float(sys.argv[2])
    small, chain = random_chain(20), random_chain(stages)
    solve(small, limit_at(small, share))
    limit = limit_at(chain, share)
    before = peak_resident_bytes()
    solve(chain, limit)
    print(before, peak_resident_bytes())


if __name__ == "__main__":
    main()
