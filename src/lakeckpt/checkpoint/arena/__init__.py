"""This package keeps complete cuts in host memory, which outlives the process that made them.

::

    tensors and their sizes → [slices]: places → [layout]: bytes of generations
                                                     |
                           [folder]: makes, finds, removes the file
                                                     |
                capture → [filling] → [arena]: generations, odd while they are written; [locks] of who reads or writes
                                                     |
                                                [contents] → tensors and documents → persist, restore
                                                     ^
                                    agent → [checksums]: taken behind the copy

    [holdings]: which cuts a node holds, and whose shares of them. [dividing]: which share a replica captures.
    [drift]: replicas that have drifted apart. [markers]: a launcher's job has begun a run at a place.
"""
