"""What does a save cost a job whose consumption depends on the data?  ``python -m benchmarks.tracker [--json FILE]``

The first table simulates the ranks of large jobs with the code that reports and merges their places. *records*: the
report of each rank lies in its record of the save, and the committer merges all of them, as lakeckpt does. *tree*: the
same places go up from ranks to nodes, to groups of nodes and to the job, in messages of their own. *lockstep*: an
ordinary reader, of which a digest crosses in the round that a save has in any case. All lanes have moved since the last
save. Bytes are those of the places alone; *root* is the processor time of the committer, or of the top of the tree;
*log* are the bytes of the reader's record in the log.

The second table has the state of a job on 10 TB (80,000 row groups) with 128 workers, as a checkpoint holds it. The
published figure for such a job is 35 to 45 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.measure import show
from lakeckpt.checkpoint.consumed.pending import PendingRecord
from lakeckpt.checkpoint.consumed.reports import of_all_ranks, reports_of
from lakeckpt.checkpoint.format.manifest import ReaderRecord, Stretch
from lakeckpt.core.changes import moved, part_of, replan, start
from lakeckpt.core.consumption import consumption
from lakeckpt.core.identity import Identity, Maker, Mixing
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixing import fractions
from lakeckpt.core.streams.mixture import reweighed, started
from lakeckpt.tracking.rounds import facts_from_bytes, facts_to_bytes
from lakeckpt.tracking.tally import Tally
from lakeckpt.wire.documents import to_plain
from lakeckpt.wire.envelope import dumps

RANKS, WORKERS = 8, 4
"""Of a node; of a rank."""
FAN_IN = 16
"""How many nodes, or groups of nodes, send to one in the tree."""
ROW_GROUPS, ROWS = 80_000, 10**10
TOKENS, LENGTH = 25 * 10**11, 2048
LANES = 128
MOST_BYTES, MOST_BYTES_OF_POSITIONS, MOST_BYTES_OF_SOURCE = 64 * 1024, 1024, 64
SPEC = OrderSpec(seed=7, shuffle=True, window=4)
_TOKENIZER = Maker(name="a tokenizer", how="packed", length=LENGTH, fingerprint="form:" + "0" * 32)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a save costs a job."""

    nodes: int
    ranks: int
    way: str
    messages: int
    """Those that the save has in any case not counted."""
    depth: int
    total_bytes: int
    root_bytes: int
    root_s: float
    log_bytes: int
    """Of the reader's record in the log: its state, and both ends of what was consumed since the last save."""


def identity_of(rows: int, **more: Any) -> Identity:
    """The identity of an order of a table."""
    return Identity(table="0" * 32, selection="", rows=rows, spec=SPEC, tail="short", endless=False, **more)


def timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """What ``work`` returns, and the seconds of processor time that it took."""
    begun = time.process_time()
    return work(), time.process_time() - begun


# --- a save


def states_of(nodes: int) -> tuple[State, State]:
    """The states of a job at one save, and at the next."""
    numbers, world_size = random.Random(nodes), nodes * RANKS
    identity = replace(identity_of(ROWS), maker=_TOKENIZER)
    begin = start(identity, epoch=0, num_lanes=world_size * WORKERS, batch_size=64, world_size=world_size)
    rows = ROWS // begin.segment.num_lanes // 2

    def place(least: int) -> tuple[int, int]:
        return least + numbers.randrange(1000), numbers.randrange(64)

    before = moved(begin, step=10**5, frontiers={lane: place(rows) for lane in begin.frontiers})
    after = moved(
        before, step=10**5 + 1000, frontiers={lane: place(at + 500) for lane, (at, _) in before.frontiers.items()}
    )
    return before, after


def pending_of(before: State, after: State, rank: int) -> tuple[PendingRecord, ...]:
    """What the journal of a rank has pending at the second save."""
    begin, end = part_of(before, rank).to_plain(), part_of(after, rank).to_plain()
    record = ReaderRecord(state=end, stretches=(Stretch(begin=begin, end=end, consumed={}),))
    return (PendingRecord(first=1, step=2, record=record),)


def by_records(before: State, after: State) -> Cost:
    """The committer reads the places out of the records of all ranks."""
    every = [pending_of(before, after, rank) for rank in range(before.segment.world_size)]
    own, reports = every[0], [reports_of({"reader": one}) for one in every]
    (whole,), root_s = timed(lambda: of_all_ranks("reader", own, reports))
    assert whole.record.state == after.to_plain()
    size = sum(len(one["reader"]) for one in reports)
    return cost_of(before, after, "records", messages=0, depth=1, total_bytes=size, root_bytes=size, root_s=root_s)


def in_lockstep(flow: State) -> Cost:
    """A digest of the state of each rank crosses with the other facts of the save."""
    fact = {"digest of state of reader 'reader'": "0" * 32}
    lanes, batch_size, world_size = flow.segment.topology
    begin = start(
        replace(flow.identity, maker=None), epoch=0, num_lanes=lanes, batch_size=batch_size, world_size=world_size
    )
    data = [facts_to_bytes({**fact, "optimizer step": "100000"})] * world_size
    size = sum(map(len, data)) - len(facts_to_bytes({"optimizer step": "100000"})) * len(data)

    def compare() -> None:
        Tally.of(list(map(facts_from_bytes, data))).require_agreement(fact)

    _, root_s = timed(compare)
    before, after = begin.moved(step=1000), begin.moved(step=2000)
    return cost_of(before, after, "lockstep", messages=0, depth=1, total_bytes=size, root_bytes=size, root_s=root_s)


def cost_of(before: State, after: State, way: str, **found: Any) -> Cost:
    ranks, begin, end = after.segment.world_size, before.to_plain(), after.to_plain()
    stretch = Stretch(begin=begin, end=end, consumed=consumption(before, after))
    record = to_plain(ReaderRecord(state=end, stretches=(stretch,)))
    log_bytes = len(dumps(record, kind="value", version=(1, 0), compress=True))
    return Cost(nodes=ranks // RANKS, ranks=ranks, way=way, log_bytes=log_bytes, **found)


# --- a state


def positions_of(identity: Identity, topologies: int) -> State:
    """The state in the middle of an epoch, after so many topologies."""
    topology = {"num_lanes": LANES, "batch_size": 64, "world_size": LANES}
    state = start(identity, epoch=3, **topology)
    for number in range(1, topologies + 1):
        state = state.moved(step=state.step + 1000)
        state = replan(state, **{**topology, "world_size": LANES // (1 + number % 2)})
    return state


def flow_of(identity: Identity, cuts: int) -> State:
    """The state of a flow in the middle of an epoch, after so many re-cuts for another number of workers."""
    numbers, lanes = random.Random(cuts), LANES
    state = start(replace(identity, maker=_TOKENIZER), epoch=3, num_lanes=lanes, batch_size=64, world_size=lanes)
    for number in range(1, cuts + 2):
        every = {
            lane: (done + 10**6 + numbers.randrange(10**5), numbers.randrange(1, 64))
            for lane, (done, _) in state.frontiers.items()
        }
        state = moved(state, step=state.step + 50_000, frontiers=every)
        lanes = LANES - 32 * (number % 2)
        if number <= cuts:
            state = replan(state, num_lanes=lanes, batch_size=64, world_size=lanes)
    return state


def mixture_of(sources: int, changes: int) -> State:
    """The state of a mixture of packed sources, after so many changes of the weights."""
    names = tuple(f"source {number}" for number in range(sources))
    mixing = Mixing(names=names, weights=weights_of(names, 0), seed=7, whole=False, exhausted="next_epoch")
    numbers, identities = random.Random(sources), []
    for _ in names:
        tokens = TOKENS // sources + numbers.randrange(10**9)
        table, selection = f"{numbers.getrandbits(128):032x}", f"{numbers.getrandbits(128):032x}"
        packed = identity_of(-(-tokens // LENGTH), unit=LENGTH, tokens=tokens)
        identities.append(replace(packed, table=table, selection=selection, endless=True))
    state = started(mixing, tuple(identities), {"num_lanes": LANES, "batch_size": 64, "world_size": LANES})
    for change in range(1, changes + 1):
        state = reweighed(state.moved(step=state.step + 1000), weights_of(names, change))
    return state.moved(step=state.step + 1000)


def weights_of(names: Sequence[str], change: int) -> tuple[int, ...]:
    """Weights of sources, in fractions, after so many changes."""
    shares = fractions({name: 1 + (number + change) % 5 for number, name in enumerate(names)})
    return tuple(shares[name] for name in names)


def states() -> dict[str, tuple[State, int]]:
    """The states of the job on 10 TB, and the most bytes that each may take."""
    packed = identity_of(-(-TOKENS // LENGTH), unit=LENGTH, tokens=TOKENS)
    rows = identity_of(ROWS)
    return {
        "rows": (positions_of(rows, 1), MOST_BYTES_OF_POSITIONS),
        "packed": (positions_of(packed, 1), MOST_BYTES_OF_POSITIONS),
        "packed, after 31 changes of the number of ranks": (positions_of(packed, 31), MOST_BYTES_OF_POSITIONS),
        "packed and mixed, 8 sources": (mixture_of(8, 0), MOST_BYTES_OF_POSITIONS + 8 * MOST_BYTES_OF_SOURCE),
        "packed and mixed, 8 sources, weights changed twice": (
            mixture_of(8, 2),
            MOST_BYTES_OF_POSITIONS + 8 * MOST_BYTES_OF_SOURCE,
        ),
        "packed and mixed, 64 sources, weights changed twice": (
            mixture_of(64, 2),
            MOST_BYTES_OF_POSITIONS + 64 * MOST_BYTES_OF_SOURCE,
        ),
        "data-dependent": (flow_of(rows, 0), MOST_BYTES),
        "data-dependent, workers changed once": (flow_of(rows, 1), MOST_BYTES),
        "data-dependent, workers changed 8 times": (flow_of(rows, 8), MOST_BYTES),
    }


def size_of(state: State) -> int:
    """The bytes of a state in a document, which is compressed as the log is."""
    return len(dumps(state.to_plain(), kind="value", version=(1, 0), compress=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[256, 2048], help="how many (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    costs: list[Cost] = []
    for nodes in options.nodes:
        before, after = states_of(nodes)
        costs += [by_records(before, after), in_lockstep(after)]
    sizes = {name: size_of(state) for name, (state, _) in states().items()}
    show(
        f"A save of a job with {RANKS} ranks a node and {WORKERS} workers a rank",
        ("nodes", "ranks", "way", "messages", "depth", "bytes", "to the root", "root", "log"),
        [
            (
                f"{one.nodes:,}",
                f"{one.ranks:,}",
                one.way,
                f"{one.messages:,}",
                f"{one.depth}",
                f"{one.total_bytes:,}",
                f"{one.root_bytes:,}",
                f"{one.root_s:.3f} s",
                f"{one.log_bytes:,}",
            )
            for one in costs
        ],
    )
    show(
        f"The state of a job on 10 TB ({ROW_GROUPS:,} row groups), {LANES} workers",
        ("state", "bytes", "at most", "holds"),
        [
            (name, f"{sizes[name]:,}", f"{most:,}", "yes" if sizes[name] <= most else "NO")
            for name, (_, most) in states().items()
        ],
    )
    if options.json is not None:
        found = {"saves": [asdict(one) for one in costs], "states": sizes}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
