"""Check plans by real training steps: verify, compare, and choose among strategies."""
