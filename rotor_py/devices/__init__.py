"""Devices that need not be there: what they have, how long their operators take, and what their allocator reserves."""
