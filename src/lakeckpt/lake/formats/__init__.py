"""This package opens tables, and asks the library of each format what a version of a Delta, Iceberg or Hudi table has.

A module per format, imported only when a table has that format. None of them decodes a row of a data file.

::

    what the user named → [dispatch] → a listing of plain Parquet, or a format
                               |
                           [library] → [delta], [hudi] with [hudi_timeline], [iceberg/]
                               |          they ask their libraries, with the options of [clients]
                               v
                            [pinned_files]: files, deleted rows, partition values, schema of the version
                               |
                           [pinning] <--- footers, kept beside a run by [footer_cache]
                               |
                               v
                       Table, with its index            [appends]: files added since a version → more such indexes
"""
