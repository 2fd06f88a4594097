"""How long does a large job take to decide what it restores?  ``python -m benchmarks.decisions [--json FILE]``

Ranks are not processes: eight client processes act for them, one after the other, over a real TCPStore, with the code
that ranks run. Printed are, from a start signal on: *facts*, until rank 0 has one message of each node and the count of
all ranks; *decide*, in rank 0; *answer*, until the last rank has read the decision; and a *vote* without an objection,
until the last rank has read its result. Each is measured ``--times`` times, and in turn with *bare*: as many requests
as a vote makes, four for each rank, without any of our code. A vote cannot be faster than they are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from benchmarks.measure import show
from lakeckpt.recovery.decide import Decision, decide
from lakeckpt.recovery.facts import CutId, Holding, NodeFacts
from lakeckpt.recovery.shares import ShareList
from lakeckpt.tracking.exchange import StoreExchange
from lakeckpt.tracking.key_waits import KeyWaits
from lakeckpt.tracking.rounds import facts_to_bytes
from lakeckpt.tracking.tally import Tally

TIMEOUT = timedelta(seconds=300)
HELD, DECISION = "held", "decision"
KINDS = ("decision", "vote", "bare")
_waits: dict[int, KeyWaits] = {}


class Rank(StoreExchange):
    """A rank that has met the others; it watches no processes. The ranks of a client share its connections."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(store, rank=rank, world_size=world_size, timeout_s=TIMEOUT.total_seconds())
        self._store = store

    def _meet(self, node: str) -> list[int]:
        return [self.rank]

    def _ask_for_the_name(self) -> str:
        return "job"

    def _until(self, key: str, *args: Any, **options: Any) -> bool:
        """The first rank of a client waits; the others come when all is there, and ask once, as they would wait."""
        return bool(self._store.check([key])) or super()._until(key, *args, **options)

    def _waits_in(self, store: Any) -> KeyWaits:
        return _waits.setdefault(id(store), KeyWaits(store))

    def said(self, facts: dict[str, str]) -> int:
        """State facts, and return the number of the round."""
        number = self._next_round()
        self._send(number, facts_to_bytes(facts) if facts else b"")
        return number

    def heard(self, number: int) -> Tally:
        """Return the answer of a round."""
        return self._await_answer(number)


def node_facts(at: int, ranks_of_node: int, world_size: int, moved: int) -> NodeFacts:
    """Return the facts of a node that holds four cuts of each of its ranks, and runs those of the node ``moved`` on."""
    first = at * ranks_of_node
    ranks = tuple(range(first, first + ranks_of_node))
    here = tuple((rank + moved * ranks_of_node) % world_size for rank in ranks)
    shares = _shares(world_size)
    cuts = [CutId(attempt=0, step=1000 - age) for age in range(4)]
    held = (Holding(cut=cut, digest=b"d" * 16, world=world_size, ranks=ranks, listed=shares.digest) for cut in cuts)
    address, lists = f"10.0.{at // 256}.{at % 256}:43210", (shares.document,)
    return NodeFacts(node=f"node-{at:04d}", ranks=here, holdings=tuple(held), address=address, lists=lists)


@cache
def _shares(world_size: int) -> ShareList:
    """Return the list of a job whose ranks all hold the same, as under data parallelism."""
    return ShareList.of([b"the same"] * world_size)


def act(client: int, port: int, options: argparse.Namespace) -> None:
    """Act for every eighth part of the ranks, in each round."""
    store = PrefixStore("job", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT))
    world_size = options.nodes * options.ranks
    ranks = [Rank(store, rank, world_size) for rank in range(1, world_size) if rank % options.clients == client]
    texts = {
        rank.rank: node_facts(rank.rank // options.ranks, options.ranks, world_size, options.moved).to_text()
        for rank in ranks
        if rank.rank % options.ranks == 0
    }
    store.add("ready", 1)
    for number in range(len(KINDS) * options.times):
        kind = KINDS[number % len(KINDS)]
        facts = {rank: {HELD: text} for rank, text in texts.items()} if kind == "decision" else {}
        store.wait([f"go/{number}"])
        if kind == "bare":
            for rank in ranks:
                ask(store, f"bare/{rank.rank}")
        else:
            begun = [(rank, rank.said(facts.get(rank.rank, {}))) for rank in ranks]
            for rank, at in begun:
                rank.heard(at)
        if store.add(f"done/{number}", 1) == options.clients:
            store.set(f"over/{number}", "1")


def ask(store: Any, key: str) -> None:
    """Make the requests of a rank in a vote: its bit, its wait, its sign that it has read, and the removal of a key."""
    store.add(key, 1)
    store.check([key])
    store.add(key, 1)
    store.delete_key(key)


def measured(host: Any, options: argparse.Namespace) -> dict[str, list[float]]:
    """Be rank 0, and return the seconds of each part."""
    world_size = options.nodes * options.ranks
    zero = Rank(host, 0, world_size)
    own = {HELD: node_facts(0, options.ranks, world_size, options.moved).to_text()}
    while host.add("ready", 0) < options.clients:
        time.sleep(0.05)
    found: dict[str, list[float]] = {"facts": [], "decide": [], "answer": [], "vote": [], "bare": []}
    for number in range(len(KINDS) * options.times):
        kind = KINDS[number % len(KINDS)]
        at = [time.perf_counter()]

        def answer(tally: Tally, at: list[float] = at) -> Tally:
            at.append(time.perf_counter())
            if HELD not in tally.facts:
                return tally
            nodes = [NodeFacts.from_text(text) for text in tally.facts[HELD]]
            decision = decide(nodes, world_size=world_size, takes=lambda cut: cut.step > 900)
            assert decision.cut == CutId(attempt=0, step=1000)
            at.append(time.perf_counter())
            return Tally.of([{DECISION: decision.to_text()}])

        host.set(f"go/{number}", "1")
        tally = zero.answered(own if kind == "decision" else {}, answer) if kind != "bare" else Tally(facts={})
        host.wait([f"over/{number}"])
        at.append(time.perf_counter())
        if kind != "decision":
            found[kind].append(at[-1] - at[0])
        else:
            assert Decision.from_text(tally.value(DECISION)).cut is not None
            for part, begin_s, end_s in zip(("facts", "decide", "answer"), at[:-1], at[1:], strict=True):
                found[part].append(end_s - begin_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2048, help="how many (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="of each node (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="processes that act for ranks (default: %(default)s)")
    parser.add_argument("--moved", type=int, default=0, help="so many nodes on are the ranks now (default: none)")
    parser.add_argument("--times", type=int, default=3, help="how often (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    context = multiprocessing.get_context("spawn")
    clients = [context.Process(target=act, args=(at, server.port, options)) for at in range(options.clients)]
    for one in clients:
        one.start()
    found = measured(PrefixStore("job", server), options)
    for one in clients:
        one.join()
    rows = [
        (part, f"{min(took):.2f} s", f"{statistics.median(took):.2f} s", f"{max(took):.2f} s")
        for part, took in found.items()
    ]
    what = f"{options.nodes} nodes of {options.ranks} ranks, {options.clients} client processes"
    ratios = [vote / bare for vote, bare in zip(found["vote"], found["bare"], strict=True)]
    rows.append(("vote / bare", f"{min(ratios):.2f}", f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}"))
    show(what, ("part", "best", "median", "worst"), rows)
    if options.json is not None:
        plain = {"nodes": options.nodes, "ranks": options.ranks, "moved": options.moved, "seconds": found}
        options.json.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
