"""This module finds which nodes keep copies or parity of which rank, from what nodes of a job state after a restore.

The first rank of each node states the node's ranks, its failure domain, and its name, which outlives ranks. All ranks
compute the same groups from these facts (`lakeckpt.recovery.placement`). For parity, the first ranks of a group's nodes
have parity of their own, and so have the second ones. The module starts no threads.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.peers.serve import own_address
from lakeckpt.recovery.placement import Mode, NodePlace, domain_of, groups_of
from lakeckpt.tracking.tally import Tally
from lakeckpt.wire.documents import Count, Positive

__all__ = ["Copying", "Keeping", "keeping_of", "node_facts"]

_FACT = "node with copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """What nodes keep of each other's shares, every how many seconds, and every how many steps a cut is captured."""

    mode: Mode
    every_s: float
    capture_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What other nodes keep of a rank's share, which they are given every ``every_s`` seconds: the nodes whose first
    ranks are the ``keepers``, the next one in the group first.

    ``here``: the ranks of this rank's node. ``keeps``: the ranks of which this node keeps copies or documents.
    ``capture_every``: every so many steps a cut is captured. ``members``: the ranks that have parity together with this
    one, in the order of the group; keeper n keeps it for its rank ``parity_of[n]``. Empty: the one keeper has a copy.
    """

    keepers: tuple[Count, ...]
    here: tuple[Count, ...]
    keeps: tuple[Count, ...]
    every_s: float
    capture_every: Positive
    members: tuple[Count, ...] = ()
    parity_of: tuple[Count, ...] = ()


def node_facts(ranks: Sequence[int], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the facts of the first rank of a node, on which these ``ranks`` run, for `keeping_of`."""
    name = f"{socket.gethostname()} at {own_address(environment)}"
    return {_FACT: json.dumps([name, domain_of(environment, name), list(ranks)])}


def keeping_of(tally: Tally, here: Sequence[int], rank: int, copying: Copying) -> tuple[Keeping | None, str]:
    """Return who keeps what of a rank of the node ``here``, from the facts of all nodes; None: nobody. And a warning,
    if it is not protected against the loss of a node, or of a failure domain; else it is empty. Only the first rank of
    a node is warned of what concerns all of them."""
    mode, is_first = copying.mode, rank == here[0]
    ranks: dict[str, list[int]] = {}
    places: list[NodePlace] = []
    for text in tally.facts.get(_FACT, {}):
        name, domain, several = json.loads(text)
        node = f"{name}, rank {several[0]:05d}"  # several nodes of a test may have one name
        ranks[node] = several
        places.append(NodePlace(node=node, domain=domain))
    own = next((node for node, several in ranks.items() if several[0] == here[0]), None)
    if own is None:
        text = "unprotected: the job has one node, or the ranks of this node do not follow each other"
        return None, text if is_first else ""
    group = next(one for one in groups_of(places, mode) if own in one.members)
    at = here.index(rank) if mode == "3+1" else 0
    keepers = [node for node in group.keepers(own) if at < len(ranks[node])]
    if not keepers:
        if len(group.members) > 1:
            return None, f"rank {rank} is unprotected: no other node of its group has {at + 1} ranks"
        return None, group.warning if is_first else ""
    given = [node for node in group.members if node != own and group.keepers(node)[0] == own]
    members = [node for node in group.members if at < len(ranks[node])] if mode == "3+1" else []
    keeping = Keeping(
        keepers=tuple(ranks[node][0] for node in keepers),
        here=tuple(here),
        keeps=tuple(other for node in given for other in ranks[node]),
        every_s=copying.every_s,
        capture_every=copying.capture_every,
        members=tuple(ranks[node][at] for node in members),
        parity_of=tuple(ranks[node][at] for node in keepers) if members else (),
    )
    return keeping, group.warning if is_first else ""
