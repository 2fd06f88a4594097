"""This package holds the readers of packed sequences and mixtures: a module for each measured package."""
