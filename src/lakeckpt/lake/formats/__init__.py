"""This package opens tables, and asks the library of each format what a version of a Delta, Iceberg or Hudi table has.

A module per format, imported only when a table has that format. None of them decodes a row of a data file.
"""
