"""Table formats: what a version of a Delta, Iceberg or Hudi table consists of, each told by its maintained library.

A module per format, imported only when a table has that format. None of them decodes a row of a data file.
"""
