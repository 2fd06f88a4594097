"""This package stores bytes on local disks, in object stores, and in file systems of fsspec.

::

    path or URL, storage_options
                |
             [open] ---> [local] → [direct]: large files past the page cache
                |
                +------> [object_store] → [store_options]; [retry]: deadlines; [store_errors]: our errors
                |
                +------> [fsspec]: tables only, never written

    Each of the three is a `Storage` of [base]: list, read, put, put_new, delete.
"""
