"""Checkpoints of others: what they hold is read without doing what they say, and ours are written as theirs."""
