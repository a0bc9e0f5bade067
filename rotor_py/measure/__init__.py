"""What a model costs as a chain, and how a limit in bytes is divided."""
