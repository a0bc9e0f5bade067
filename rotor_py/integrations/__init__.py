"""Plan models in place with a callback or hook, for trainers that own the model.

Each module needs its library and is imported by name: `transformers_callback`, `lightning_callback`, `accelerate_hook`.
"""
