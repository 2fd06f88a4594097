"""This package holds the pure plans of streams that several tables feed.

::

    weights, seed → [turns]: the source of each row
                       |
                    [mixing]: the share of a source in each micro-batch
                       |
                    [stream]: deals epochs without end to lanes, one source at a time
                       |
    state → [mixture]: plans all sources, changes weights → [mixed_batches]: assignments, receipts

    which source gives the next position of a lane of a flow: [flow_turns]

    items of each position of a lane → [lane_batches] → micro-batches, and where the lane stands after each
"""
