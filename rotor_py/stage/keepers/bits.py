"""Booleans as bits, eight to a byte.

Eight booleans are eight bytes of 0 or 1, which are one integer of 64 bits. A multiplication brings their lowest bits
side by side into its highest byte; another one spreads a byte, and a mask takes one bit of each copy. So a few passes
over n/8 integers do the work, with vector instructions, on every device.
"""

from __future__ import annotations

import torch

_GATHER = 0x0102040810204080
"""byte i times the byte 7 - i of this, 2**i, is what adds up in the highest byte; no sum carries into another byte"""
_COPIES = 0x0101010101010101
_ONE_OF_EACH = 0x8040201008040201 - 2**64
"""bit i of byte i; the same bits as a signed integer"""
_CARRY = 0x7F7F7F7F7F7F7F7F
"""added to a byte, this sets its highest bit if the byte is not 0"""


def packed_bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of flat booleans, as uint8. Up to seven values beyond a multiple of eight are bytes of their own."""
    count = values.numel()
    whole = count // 8
    bits = torch.empty(whole + count % 8, dtype=torch.uint8, device=values.device)
    if whole:
        integers = values[: 8 * whole].view(torch.int64) * _GATHER
        bits[:whole] = integers.bitwise_right_shift_(56).bitwise_and_(0xFF)
    bits[whole:] = values[8 * whole :]
    return bits


def unpacked_bits(bits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` booleans of which `packed_bits` made `bits`."""
    whole = count // 8
    values = torch.empty(count, dtype=torch.bool, device=bits.device)
    if whole:
        integers = values[: 8 * whole].view(torch.int64)
        integers.copy_(bits[:whole])
        integers.mul_(_COPIES).bitwise_and_(_ONE_OF_EACH).add_(_CARRY)
        integers.bitwise_right_shift_(7).bitwise_and_(_COPIES)
    values[8 * whole :] = bits[whole:]
    return values
