"""This package lets the ranks of a job compare facts and leave notes, and records which steps consumed what.

::

    a reader → [readers]: what a manager may ask of it → its state → [facts]: short texts
                                                                        |
    facts of each rank → [exchange] (the job's store) → [rounds] → [tally] → the same answer on every rank
                             |
                             +-- [ballots]: who has come. [key_waits]: a thread blocks in the store until a key is there
                             +-- [waiting]: until another rank has written, or is known not to ([obstacles])
                             +-- [notes]: errors, as a kind and a text
                             v
    work that may fail on one rank → [votes] → fails on all, or on none

    consumed at each optimizer step → [steps] → a record of runs of equal strides
"""
