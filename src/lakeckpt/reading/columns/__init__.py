"""This package turns Arrow columns into numpy columns."""
