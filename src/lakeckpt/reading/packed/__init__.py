"""This package reads documents of tokens as packed sequences: it counts tokens, and decodes windows of sequences.

::

    arguments of pack → [packing]
                            |
       before an epoch: [token_counts] → tokens of each row group → the order
                            |
       window by window: row groups → [documents] → lengths and tokens
                            |
                 documents are cut:       [window] → [runs]: which tokens each sequence has
                 documents stay whole:    [whole]: best fit decreasing
                            |
                       [sequences] → columns of a micro-batch: tokens, position_ids, labels …
"""
