"""Stages of captured models, compiled by Inductor."""
