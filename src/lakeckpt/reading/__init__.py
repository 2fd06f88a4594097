"""This package reads rows by position: it decodes, gathers and converts row groups to numpy. It imports no torch."""
