"""This package captures the state beside training: planned once, copied in idle time, fenced before the next update."""
