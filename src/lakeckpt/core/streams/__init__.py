"""This package holds the pure plans of streams that several tables feed."""
