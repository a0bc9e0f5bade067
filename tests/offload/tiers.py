"""What a tier of offloaded activations holds."""

from typing import Any

from rotor_py.offload.host_tier import HostTier


def held(tier: Any) -> int:
    """The bytes of its buffers, or of its file, that are not free."""
    if isinstance(tier, HostTier):
        return tier.buffers.taken_bytes
    with tier._lock:
        tier._sweep()
        return tier._space.end - sum(tier._space._free.sizes.values())
