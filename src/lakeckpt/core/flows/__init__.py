"""This package plans flows: streams in which one position yields any number of items."""
