"""This package fits lakeckpt into training frameworks: a module each, which imports its framework when it is loaded."""
