"""User-chosen checkpoints: by level, every n layers, or segments. No solver."""
