"""The states behind the golden documents of this folder.

``python -m tests.golden.reader_state.states`` writes the documents that are missing. A document that is there is never
written again: it stands for checkpoints that a released version left behind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.rest import Left, Rest
from lakeckpt.core.state import Identity, ReaderState, Segment
from lakeckpt.wire.reader_state import dumps_state

FOLDER = Path(__file__).parent

_ORDER = OrderSpec(seed=-7, shuffle=True, window=4)
_TABLE = Identity(
    table="00ff" * 16, selection="", rows=10**12, spec=_ORDER, tail="short", endless=False, permutation_version=1
)
_PLAIN = Identity(
    table="not hex",
    selection="ab",
    rows=1,
    spec=OrderSpec(seed=2**64 - 1, shuffle=False, window=1),
    tail="even",
    endless=False,
    permutation_version=1,
)
_STREAM = Identity(
    table="00ff" * 16,
    selection="",
    rows=1000,
    spec=OrderSpec(seed=0, shuffle=True, window=2),
    tail="short",
    endless=True,
    permutation_version=1,
)

GOLDEN: dict[str, ReaderState] = {
    "fresh": ReaderState(
        identity=_PLAIN,
        epoch=0,
        segments=(Segment(micro_batch=0, step=0, num_lanes=1, batch_size=1024, world_size=1),),
        step=0,
        row=17,
    ),
    "segments": ReaderState(
        identity=_TABLE,
        epoch=3,
        segments=(
            Segment(micro_batch=0, step=0, num_lanes=12, batch_size=512, world_size=4),
            Segment(micro_batch=400, step=100, num_lanes=12, batch_size=512, world_size=3),
            Segment(micro_batch=1000, step=300, num_lanes=10, batch_size=64, world_size=10),
        ),
        step=100_300,
    ),
    "of-a-version": ReaderState(
        identity=replace(_TABLE, version="Delta version 12"),
        epoch=3,
        segments=(Segment(micro_batch=0, step=0, num_lanes=12, batch_size=512, world_size=4),),
        step=7,
    ),
    "re-cut": ReaderState(
        identity=_TABLE,
        epoch=1,
        segments=(Segment(micro_batch=70, step=35, num_lanes=6, batch_size=3, world_size=2),),
        step=36,
        base=Rest(
            begun=(Left(epoch=1, positions=Intervals.of([(5, 9), (2**39, 2**39 + 1)]), num_lanes=4, rotation=0),),
            next_epoch=2,
        ),
    ),
    "stream": ReaderState(
        identity=_STREAM,
        epoch=0,
        segments=(
            Segment(micro_batch=90, step=30, num_lanes=3, batch_size=32, world_size=3),
            Segment(micro_batch=96, step=32, num_lanes=3, batch_size=32, world_size=1),
        ),
        step=33,
        base=Rest(
            begun=(
                Left(epoch=1, positions=Intervals.of([(990, 1000)]), num_lanes=7, rotation=6),
                Left(epoch=2, positions=Intervals.of([(1, 2), (3, 1000)]), num_lanes=7, rotation=5),
            ),
            next_epoch=3,
        ),
    ),
}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}-1.{int(bool(GOLDEN[name].identity.version))}.lkc"


def main() -> None:
    for name, state in GOLDEN.items():
        path = path_of(name)
        if not path.exists():
            path.write_bytes(dumps_state(state))
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
