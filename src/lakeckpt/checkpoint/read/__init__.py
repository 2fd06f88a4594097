"""This package reads the stored parts of checkpoints, and verifies every byte."""
