"""This package holds the commands that write: an order into a run's log, a copy of a run, a checkpoint of others.

::

    a run → [rollback]: an entry of its log
            [copy]: a run at another place
            [convert]: a checkpoint in the format of others, or a run made of such
"""
