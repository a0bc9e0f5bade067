"""Measure the seconds and bytes of one stage, and find stages that need as many without measuring each."""
