"""The best memory-persistent sequence: the program, its table and its kernels."""
