"""Run one stage, and recompute it."""
