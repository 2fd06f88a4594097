"""Captures that run beside training: planned once, copied when it costs nothing, fenced before the next update."""
