"""This package persists captured cuts in a process beside each trainer, which outlives its trainer."""
