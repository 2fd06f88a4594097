"""This package reads flows: datasets whose transform yields any number of rows of each row.

::

       rows of a lane → [source] → transform of the user by [calls]: rows
                            |      or [tokens]: sequences of tokens of texts
                            |      or [whole]: sequences of whole documents
                            v
                        [reading] → micro-batches of the lanes of a process
                            |
                         [feed]: one for each step, until [ends] of all ranks are known → loader

    a tokenizer or a transform → [fingerprints] → the identity in a state
"""
