"""From positions to columns: decode row groups, gather rows, convert to numpy. Never imports torch."""
