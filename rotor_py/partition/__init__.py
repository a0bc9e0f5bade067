"""Memory budgets inside `torch.compile`: what a compiled backward stores and what it runs again, decided in bytes."""
