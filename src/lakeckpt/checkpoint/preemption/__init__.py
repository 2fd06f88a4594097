"""This package saves the cut at hand when a signal says that the job has to end."""
