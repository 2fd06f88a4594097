"""What does the log of a run hold?  An attempt begins, says what it restored, and commits checkpoints.

A `Begin` and a `Restored` are what an attempt writes first (see ``begins``). A `Manifest` is the commit of a
checkpoint: whose parts it is made of, its parent, and for every reader its state and what was consumed since the
parent, so that the record of a run outlives the data of its checkpoints. All are values with one document each.

Imports without torch. Never touches storage: `lakeckpt.checkpoint.log` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lakeckpt.checkpoint.begins import Begin, Captured, Restored, begin_from_plain, restored_from_plain
from lakeckpt.checkpoint.digests import DIGEST_BYTES
from lakeckpt.checkpoint.fields import confined, fields_of, number, taken
from lakeckpt.checkpoint.keep import Keep
from lakeckpt.checkpoint.parts import PARTS, SaveId
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.read_ahead import BASES, Basis
from lakeckpt.core.skips import SkipList
from lakeckpt.core.state import ReaderState
from lakeckpt.errors import ConfigError, StateInvalid, WireDamaged
from lakeckpt.tracking.steps import StepRecord
from lakeckpt.wire.codec import dumps, loads
from lakeckpt.wire.reader_state import dumps_state, loads_state
from lakeckpt.wire.skips import skips_from_wire, skips_to_wire
from lakeckpt.wire.varint import pack_intervals, unpack_intervals

__all__ = [
    "Begin",
    "Captured",
    "Entry",
    "Manifest",
    "PartRef",
    "ReaderRecord",
    "Restored",
    "Stretch",
    "entry_from_bytes",
    "entry_to_bytes",
    "reader_from_plain",
    "reader_to_plain",
]

_KIND = "log"
_VERSION = (1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """A part of a checkpoint: ``digest`` is the BLAKE2b-128 (`short_digest`) of the record's ``size_bytes`` bytes."""

    rank: int
    path: str
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What a reader consumed going from one state to another, both of one order and epoch (or endless stream)."""

    begin: Mapping[str, Any]
    """The plain `lakeckpt.core.state.ReaderState` that it began with."""
    end: Mapping[str, Any]
    consumed: Mapping[int, Intervals]
    """epoch → positions."""
    basis: Basis = "inferred"
    """How it is known that steps used it."""
    reason: str = ""
    """Why it is suspected that they did not."""
    attempt: int = -1
    """The attempt that consumed it; -1: the one that committed it."""

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise WireDamaged(f"that rows were used is known by one of {', '.join(BASES)}, got {self.basis!r:.40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRecord:
    """One reader at the cut."""

    state: Mapping[str, Any]
    """The plain state of the whole job."""
    stretches: tuple[Stretch, ...] = ()
    """What was consumed since the parent, in order."""
    steps: StepRecord = field(default_factory=StepRecord)
    """The frontiers after each optimizer step since the parent."""
    index: str | None = None
    """Digest (hex) of the footer index of its table: ``index/<digest>.lkc``."""
    skips: SkipList = field(default_factory=SkipList)
    """What of the consumed positions did not come, on any rank, being damaged: since the parent, and since the start of
    every epoch that is not over."""

    def consumed(self) -> dict[int, Intervals]:
        """epoch → the positions consumed since the parent."""
        found: dict[int, Intervals] = {}
        for stretch in self.stretches:
            for epoch, positions in stretch.consumed.items():
                found[epoch] = found[epoch].union(positions) if epoch in found else positions
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint is committed."""

    run: str
    slot: int
    attempt: int
    parent: int | None
    """The slot of the checkpoint before it in its history, or None."""
    step: int
    """Optimizer steps done."""
    number: int
    """How many saves the attempt had begun before this one."""
    world_size: int
    cut: bytes
    parts: tuple[PartRef, ...]
    readers: Mapping[str, ReaderRecord]
    seed: int
    """What random states of ranks that are new after a change of the world size are derived from."""
    library: str
    created_s: float
    write_id: str
    keep: Keep | None = None
    """Which checkpoints of its history retention then left their data; None: an older lakeckpt did not say."""
    metric: float | None = None
    """How good its state is, where the training loop said so."""

    def __post_init__(self) -> None:
        if [part.rank for part in self.parts] != list(range(self.world_size)):
            raise WireDamaged(
                f"the manifest of slot {self.slot} does not have one part for each of {self.world_size} ranks"
            )
        if not self.attempt < self.slot or (self.parent is not None and not self.parent < self.slot):
            raise WireDamaged(f"slot {self.slot} names attempt {self.attempt} and parent {self.parent}, not before it")

    @property
    def save(self) -> SaveId:
        """Where its parts and objects lie."""
        return SaveId(attempt=self.attempt, step=self.step, number=self.number)


Entry = Begin | Restored | Manifest


def entry_to_bytes(entry: Entry) -> bytes:
    """The document of an entry."""
    plain = _manifest_to_plain(entry) if isinstance(entry, Manifest) else entry.to_plain()
    return dumps(plain, kind=_KIND, version=_VERSION)


def entry_from_bytes(data: bytes) -> Entry:
    """The entry that `entry_to_bytes` made ``data`` of; `WireError` where it is none."""
    plain = fields_of(loads(data, kind=_KIND, supported=_VERSION).value, "an entry of the log")
    kind = taken(plain, "entry", str)
    if kind == "begin":
        return begin_from_plain(plain)
    if kind == "restored":
        return restored_from_plain(plain)
    if kind == "commit":
        return _manifest_from_plain(plain)
    raise WireDamaged(f"an entry of the log is a begin, a restored or a commit, got {kind!r:.40}")


def _manifest_to_plain(entry: Manifest) -> dict[str, object]:
    plain: dict[str, object] = {
        "entry": "commit",
        "run": entry.run,
        "slot": entry.slot,
        "attempt": entry.attempt,
        "parent": entry.parent,
        "step": entry.step,
        "number": entry.number,
        "world_size": entry.world_size,
        "cut": entry.cut,
        "parts": [[part.rank, part.path, part.size_bytes, part.digest] for part in entry.parts],
        "readers": {name: reader_to_plain(reader) for name, reader in entry.readers.items()},
        "seed": entry.seed,
        "library": entry.library,
        "created_s": entry.created_s,
        "write_id": entry.write_id,
        "keep": None if entry.keep is None else entry.keep.last,
    }
    if entry.metric is not None:
        plain["metric"] = entry.metric
    if entry.keep is not None and entry.keep.every is not None:
        plain["keep_every"] = entry.keep.every
    if entry.keep is not None and (entry.keep.best or entry.keep.best_is != "lowest"):
        plain["keep_best"] = [entry.keep.best, entry.keep.best_is]
    return plain


def _manifest_from_plain(plain: Mapping[str, object]) -> Manifest:
    parent = plain.get("parent")
    return Manifest(
        run=taken(plain, "run", str),
        slot=number(plain, "slot"),
        attempt=number(plain, "attempt"),
        parent=None if parent is None else number(plain, "parent"),
        step=number(plain, "step"),
        number=number(plain, "number"),
        world_size=number(plain, "world_size", least=1),
        cut=taken(plain, "cut", bytes),
        parts=tuple(_part_ref(row) for row in taken(plain, "parts", list)),
        readers={
            str(name): reader_from_plain(fields_of(reader, "the record of a reader"))
            for name, reader in taken(plain, "readers", dict).items()
        },
        seed=taken(plain, "seed", int),
        library=taken(plain, "library", str),
        created_s=taken(plain, "created_s", float),
        write_id=taken(plain, "write_id", str),
        keep=None if plain.get("keep") is None else _keep_from_plain(plain),
        metric=None if plain.get("metric") is None else taken(plain, "metric", float),
    )


def _keep_from_plain(plain: Mapping[str, object]) -> Keep:
    best = plain.get("keep_best", [0, "lowest"])
    if type(best) is not list or len(best) != 2:
        raise WireDamaged(f"which checkpoints are the best is [how many, lowest or highest], got {best!r:.80}")
    every = None if plain.get("keep_every") is None else number(plain, "keep_every", least=1)
    try:
        return Keep(last=number(plain, "keep", least=1), every=every, best=best[0], best_is=best[1])
    except ConfigError as error:
        raise WireDamaged(f"what retention keeps cannot be: {error}") from None


def _part_ref(row: object) -> PartRef:
    if not isinstance(row, list) or [type(value) for value in row] != [int, str, int, bytes]:
        raise WireDamaged(f"a part in a manifest is [rank, path, size, digest], got {row!r:.80}")
    rank, path, size_bytes, digest = row
    if len(digest) != DIGEST_BYTES or size_bytes < 0:
        raise WireDamaged(f"the part of rank {rank} has {size_bytes} bytes and a digest of {len(digest)}")
    return PartRef(rank=rank, path=confined(path, below=PARTS), size_bytes=size_bytes, digest=digest)


def reader_to_plain(reader: ReaderRecord) -> dict[str, object]:
    """The record of a reader, as a manifest holds it."""
    stretches = [
        [
            _state_to_wire(one.begin),
            _state_to_wire(one.end),
            [[epoch, pack_intervals(rows.pairs())] for epoch, rows in one.consumed.items()],
            one.basis,
            one.reason,
            one.attempt,
        ]
        for one in reader.stretches
    ]
    plain: dict[str, object] = {
        "state": _state_to_wire(reader.state),
        "stretches": stretches,
        "steps": reader.steps.to_plain(),
        "index": reader.index,
    }
    if reader.skips:
        plain["skips"] = skips_to_wire(reader.skips)
    return plain


def reader_from_plain(plain: Mapping[str, object]) -> ReaderRecord:
    """What `reader_to_plain` made ``plain`` of; `WireDamaged` where it is none."""
    try:
        steps = StepRecord.from_plain(taken(plain, "steps", list))
    except (TypeError, ValueError) as error:
        raise WireDamaged(f"the record of steps is malformed: {error}") from None
    return ReaderRecord(
        state=_state_from_wire(plain.get("state")),
        stretches=tuple(_stretch(row) for row in taken(plain, "stretches", list)),
        steps=steps,
        index=None if plain.get("index") is None else taken(plain, "index", str),
        skips=skips_from_wire(plain.get("skips", [])),
    )


def _stretch(row: object) -> Stretch:
    row = [*row, "inferred", "", -1] if isinstance(row, list) and len(row) == 3 else row
    if not isinstance(row, list) or [type(one) for one in row[2:]] != [list, str, str, int]:
        raise WireDamaged(f"a stretch is [state, state, consumed, basis, reason, attempt], got {row!r:.80}")
    begin, end, consumed, basis, reason, attempt = row
    found = {}
    for pair in consumed:
        if not isinstance(pair, list) or [type(value) for value in pair] != [int, bytes]:
            raise WireDamaged(f"what was consumed is [epoch, intervals], got {pair!r:.80}")
        found[pair[0]] = Intervals.of(unpack_intervals(pair[1]))
    return Stretch(
        begin=_state_from_wire(begin),
        end=_state_from_wire(end),
        consumed=found,
        basis=basis,
        reason=reason,
        attempt=attempt,
    )


def _state_to_wire(plain: Mapping[str, Any]) -> bytes | dict[str, Any]:
    """The document of a reader state, at most 1 KiB and 16 bytes per interval; another reader's state as it is."""
    try:
        state = ReaderState.from_plain(plain)
    except StateInvalid:
        return dict(plain)
    return dumps_state(state) if state.to_plain() == plain else dict(plain)


def _state_from_wire(value: object) -> dict[str, Any]:
    if isinstance(value, bytes):
        return loads_state(value).to_plain()
    if type(value) is not dict:
        raise WireDamaged(f"the state of a reader is a document or a dict, got {value!r:.80}")
    return value
