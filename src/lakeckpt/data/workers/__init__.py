"""This package runs the worker processes of a LakeLoader."""
