"""This package finds and reads the bytes of tables: storage, pinned listings, Parquet files. It never imports torch.

::

    path, URL, catalog → [formats/]: which files does the version of the table have?
                             |  ^
                             |  +-- [storage/]: lists, reads and writes objects
                             v
                         [table/]: the index, which pins files, row groups and deleted rows
                             |
                             v
    row group wanted → [parquet/]: fetches column chunks, decodes them → Arrow table
"""
