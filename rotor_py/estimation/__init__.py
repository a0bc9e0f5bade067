"""Estimate a training step on a simulated device."""
