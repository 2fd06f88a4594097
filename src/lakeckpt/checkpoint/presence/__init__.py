"""This package knows whether a run, and the jobs that train it, are there.

::

    a restore → [presence]: does another job live? a note that this one does
                    |
                [away]: the place is empty: is the run new, or away?
"""
