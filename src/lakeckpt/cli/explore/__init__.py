"""This package makes a page of a run: ``lakeckpt explore``."""
