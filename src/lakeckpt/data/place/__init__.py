"""This package keeps the place of a reader in its rows, and chooses which rows those are."""
