"""This package reads a run as other tools do, and reads and writes the checkpoint formats of others."""
