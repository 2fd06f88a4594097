"""This package reads Parquet files: their footers, the ranges of their column chunks, and their row groups."""
