"""Classical strategies, which keep the inputs of stages and nothing else."""
