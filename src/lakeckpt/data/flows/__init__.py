"""This package reads flows: datasets whose transform yields any number of rows of each row."""
