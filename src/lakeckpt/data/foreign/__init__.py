"""Loaders and wrappers of other libraries."""
