"""One line for trainers that own the model: a callback, or a hook, plans it where it stands.

Each file needs its library, and is imported by name: `transformers_callback`, `lightning_callback`, `accelerate_hook`.
"""
