"""This package computes the order of rows: lanes, segments, plans, receipts. It imports only numpy, and does no I/O."""
