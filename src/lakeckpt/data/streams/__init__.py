"""This package defines what language models read: documents packed into sequences."""
