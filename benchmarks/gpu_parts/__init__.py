"""What benchmarks/gpu.py runs: models, ways to take their steps, rows of results, and tables of them."""
