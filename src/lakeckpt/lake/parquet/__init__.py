"""This package reads Parquet files: their footers, the ranges of their column chunks, and their row groups.

::

    a table is opened:     file → [footer] → row counts, digest → index
    a row group is read:   file → [footer] → [kept_footers]
                                                 |
                  [prefetch]: opens files, reads ahead ---> [ranges]: few requests, in threads
                                                 |              ^
                  [row_group]: plans the ranges -|--------------+  by [column_chunks] of the footer
                                                 v
                  [row_group]: decodes the pages → [fit] with [types]: columns as the table has them
"""
