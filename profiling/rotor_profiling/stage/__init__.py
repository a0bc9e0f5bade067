"""Measure one stage, and identify stages that cost the same."""
