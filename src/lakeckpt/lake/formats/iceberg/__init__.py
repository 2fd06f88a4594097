"""This package reads the metadata of Iceberg tables.

::

    catalog, metadata file, folder → [source] → table and snapshot        [io]: our storages as pyiceberg's FileIO
                                        |
                           manifests → [plan]: data files, and the deletes that apply to each
                                        |
                      +-----------------+------------------+
             [position_deletes]                   [equality_deletes] → deleted rows of each data file
                      +-----------------+------------------+
                                        v
                            [snapshot] with [schema] → files, deleted rows, column mapping
"""
