"""This package reads the rows that a filter keeps: it counts them once, gives them an identity, and decodes them."""
