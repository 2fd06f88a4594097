"""Checkpoints of one cut: captured, staged, persisted, verified, committed; and the record of all of them."""
