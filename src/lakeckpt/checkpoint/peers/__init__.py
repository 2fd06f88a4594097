"""This package reads shares of cuts from the memory of other nodes, over TCP, and keeps copies of them on other nodes.

::

    facts: the address of [serve] → decide → a rank's sources: own memory, its node's, other nodes
                                                                   |
       a node that has lost its memory                             |          a node that has not
            [sources] ← leaves, each verified ← [fetch] ←—— [wire]: frames, challenge ——→ [serve] ← arenas

    while a job trains → [alike]: which ranks capture the same share; [next_node]: is the next node there?
    copies: [grouping]: who keeps whose → [copies]: an agent gives its rank's share → [serve] → [slots] of the keeper
    parity: [copies]: pieces of the share, as [parity] divides it → [serve] → [joining]; read again by [rebuilt]
"""
