"""The best sequence whose checkpoints may be dropped early: the program and its kernels."""
