"""This package holds what a table consists of at one version.

::

    folder, glob, list → [listing]: files
                             |
       their footers → [schema]: one schema for all        [column_mapping]: where a file stores each column
       their paths   → [partitions]: a value for each file, as [scalars]
       a format's    → [version], [deletes]: rows that do not exist
                             |
                             v
                          [index]: all of it in arrays, with one digest <--- [joined]: files added to a growing table
                             |
                             v
                          [table] → opened files, compared with what was pinned
"""
