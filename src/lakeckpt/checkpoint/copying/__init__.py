"""This package keeps copies of a run at other places.

::

    a run → [run_copy] → a run at another place
               ^
    [backups]: after commits, as often as a `Backup` says; [by_ranks]: before a restore from another run
"""
