"""This package holds the command line: thin commands that print tables for people, or JSON for programs.

::

    arguments → [main] → the module of the command → [output] → text, or JSON
                              |
         a table:    [plan/]
         a run, by [run_arguments]:    [inspect], [verify], [audit], [explain], [explore/], [faults],
                                       [writing/]
         this node:  [doctor], [node/], [watch]
         a job:      [launch/] → torchrun's agent → ranks, forked from a server that has imported torch
"""
