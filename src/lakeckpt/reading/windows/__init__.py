"""This package decodes windows: row groups in the order of an epoch."""
