"""Measure the seconds and bytes of one stage, and find other stages that cost the same."""
