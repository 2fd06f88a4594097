"""This module finds which node keeps the copies of which rank, from what the nodes of a job state after a restore.

The first rank of each node states the node's ranks, its failure domain, and its name, which outlives ranks. All ranks
compute the same groups from these facts (`lakeckpt.recovery.placement`). The module starts no threads.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.peers.serve import own_address
from lakeckpt.recovery.placement import NodePlace, domain_of, groups_of
from lakeckpt.tracking.tally import Tally
from lakeckpt.wire.documents import Count, Positive

__all__ = ["Keeping", "keeping_of", "node_facts"]

_FACT = "node with copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Which copies of a rank's share are made: by the node whose first rank is ``keeper``, every ``every_s`` seconds.

    ``here``: the ranks of this rank's node. ``keeps``: the ranks whose copies this node keeps. ``capture_every``: every
    so many steps a cut is captured.
    """

    keeper: Count
    here: tuple[Count, ...]
    keeps: tuple[Count, ...]
    every_s: float
    capture_every: Positive


def node_facts(ranks: Sequence[int], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the facts of the first rank of a node, on which these ``ranks`` run, for `keeping_of`."""
    name = f"{socket.gethostname()} at {own_address(environment)}"
    return {_FACT: json.dumps([name, domain_of(environment, name), list(ranks)])}


def keeping_of(tally: Tally, here: Sequence[int], *, every_s: float, capture_every: int) -> tuple[Keeping | None, str]:
    """Return who keeps the copies of the ranks of the node ``here``, from the facts of all nodes; None: nobody. And a
    warning, if they are not protected against the loss of a node, or of a failure domain; else it is empty."""
    ranks: dict[str, list[int]] = {}
    places: list[NodePlace] = []
    for text in tally.facts.get(_FACT, {}):
        name, domain, several = json.loads(text)
        node = f"{name}, rank {several[0]:05d}"  # several nodes of a test may have one name
        ranks[node] = several
        places.append(NodePlace(node=node, domain=domain))
    own = next((node for node, several in ranks.items() if several[0] == here[0]), None)
    if own is None:
        return None, "unprotected: the ranks of this node do not follow each other, or run on no other node"
    group = next(one for one in groups_of(places, "copy") if own in one.members)
    keepers = group.keepers(own)
    if not keepers:
        return None, group.warning
    keeping = Keeping(
        keeper=ranks[keepers[0]][0],
        here=tuple(here),
        keeps=tuple(rank for node in group.kept(own) for rank in ranks[node]),
        every_s=every_s,
        capture_every=capture_every,
    )
    return keeping, group.warning
