"""This package is the command ``lakeckpt demo``, which trains a small GPT, kills ranks, and counts every token.

::

    folder → [demo]: tables by [lake], phases and faults by [scenario]
                                                   |
                        [supervise]: lakeckpt run, kills → [train] with [model] → [records]: tokens that were used
                                                   |      |
                                                   +-- [trip]: a rank stops where it is to be killed
                                                   v
                        records, audit, tables → [verdict] → text, verdict.json
"""
