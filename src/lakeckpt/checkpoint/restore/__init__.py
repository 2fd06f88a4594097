"""This package brings a state from the log or host memory into live objects.

::

    log → [run_log] → [choosing]: which checkpoint        memory of the node → [from_memory]: a newer cut
                |          |                                      |
                           +--------------> [restorer] <----------+
                                                |         → [report]
                                                v
       [from_storage] or [from_memory] reads → [applying]: [compare] → [load_into] live objects
                                                |
                         [table_versions]: which version each reader goes on with
                                                |
                         [changes]: what the script has otherwise than before
"""
