"""This package keeps complete cuts in host memory, which outlives the process that made them."""
