"""Plan models in place: a callback or hook for each trainer that makes the model or hands it to others.

Import the module for your trainer, which needs it: `transformers_callback`, `lightning_callback`, `accelerate_hook`.
"""
