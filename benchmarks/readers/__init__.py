"""Every reader of tables into torch that we know of, on the same rows in one run: ``python -m benchmarks.readers``."""
