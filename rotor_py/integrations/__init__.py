"""Callbacks and hooks by which a trainer's model follows a plan, without a change to the model object or the loop.

Import the module for your trainer: `transformers_callback`, `lightning_callback` or `accelerate_hook`.
"""
