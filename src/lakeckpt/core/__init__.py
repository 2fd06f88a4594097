"""The pure core: order, lanes, segments, receipts, frontiers. Standard library and numpy only; no I/O, no clock."""
