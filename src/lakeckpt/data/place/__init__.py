"""Where a reader is, and of which rows."""
