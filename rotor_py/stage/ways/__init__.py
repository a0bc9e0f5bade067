"""The ways to store a stage other than whole."""
