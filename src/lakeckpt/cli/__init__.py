"""This package holds the command line: thin commands that print tables for people, or JSON for programs."""
