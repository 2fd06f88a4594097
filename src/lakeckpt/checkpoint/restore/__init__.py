"""This package brings a state from the log or host memory into live objects.

::

    log → [candidates] → [choosing]: which checkpoint      memory of the node → [from_memory]: a newer cut
                |             |                                   |
       empty? [away]          +------------> [restorer] <---------+        [rollback]: an order in the log
                                                 |
                 [presence]: is another job alive here?
                                                 v
                          [trial]: [from_storage] reads → [compare] → [load_into] live objects
                                                 |
                          [table_versions]: which version each reader goes on with
                                                 |
                          [changes]: what the script has otherwise than before
"""
