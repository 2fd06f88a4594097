"""This package holds what a table consists of at one version."""
