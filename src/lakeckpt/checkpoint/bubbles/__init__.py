"""This package measures the idle windows of a rank, and admits slices of a capture into them.

::

    what a script waits for → [watch] → [pipeline]: transfers; [collectives]: other ranks; a loader: data
                                                |
                                                v  begin and end of each wait
    copier: may a slice move? ----------->  [gate], on a GPU [device] → yes, at the time that [policy] gives
                                                |
                                            [record] → median wait and share of bytes moved, site by site
"""
