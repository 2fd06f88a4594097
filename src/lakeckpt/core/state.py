"""This module holds the reader state: where the whole job is in its data. It is the same on every rank.

A state names the order it belongs to (`Identity`), the segments of the epoch at hand, and how many steps of it are
done. From these, `lakeckpt.core.plan` computes everything else: which rank gets which rows next, and which rows have
been consumed. States are values: whatever happens makes a new one.

It never lists single rows, and never holds a path, a column name or a credential: those enter as digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import get_args

from lakeckpt.core.hashing import PERMUTATION_VERSION
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Left, Rest, Tail
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.plain import integer, integers, listing, mapping, text
from lakeckpt.errors import StateInvalid

__all__ = [
    "FORMAT",
    "MAX_EPOCH",
    "MAX_EPOCHS_AT_ONCE",
    "MAX_LANES",
    "MAX_ROWS",
    "MAX_VERSION",
    "Identity",
    "ReaderState",
    "Segment",
]

FORMAT = "lakeckpt.reader/1"
"""The name and major version of a plain state."""

MAX_EPOCH = 1 << 31
"""The last epoch that can be asked for, or gone on with, save of an endless stream."""

MAX_LANES = 1 << 20
"""The most lanes of an epoch: planning takes time and memory in proportion to them."""

MAX_ROWS = 1 << 56
"""The most rows of an epoch, and of all micro-batches of a state together: below it no product overflows 64 bits."""

MAX_EPOCHS_AT_ONCE = 1 << 16
"""The most epochs of an endless stream that a micro-batch reaches over: dealing it takes time in proportion to them."""

MAX_VERSION = 64
"""The most characters of a table version's name."""

_TAILS: tuple[Tail, ...] = get_args(Tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the order of rows is a function of, less what segments say: equal identities mean equal orders."""

    table: str
    """Digest of the pinned file listing (hex)."""
    selection: str
    """Digest of the row selection (hex); empty: all rows."""
    rows: int
    """Rows of an epoch."""
    spec: OrderSpec
    tail: Tail
    endless: bool
    permutation_version: int = PERMUTATION_VERSION
    version: str = field(default="", compare=False)
    """What the table's format calls the version, for people; empty where it has none. ``table`` decides."""

    def __post_init__(self) -> None:
        if len(self.version) > MAX_VERSION:
            raise ValueError(f"a table version is named in at most {MAX_VERSION} characters, got {self.version!r:.200}")
        if self.tail not in _TAILS:
            raise ValueError(f"tail must be one of {', '.join(_TAILS)}, got {self.tail!r}")
        if not 0 <= self.rows <= MAX_ROWS:
            raise ValueError(f"an epoch has 0 to {MAX_ROWS} rows, got {self.rows}")
        if self.endless and not self.rows:
            raise ValueError("an endless stream has epochs of at least one row, got 0")

    def epochs_at_once(self, num_lanes: int, batch_size: int) -> int:
        """Return over how many epochs a micro-batch reaches: one, save of an endless stream of few rows."""
        return -(-batch_size * num_lanes // self.rows) if self.endless else 1

    def to_plain(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "table": self.table,
            "selection": self.selection,
            "rows": self.rows,
            "seed": self.spec.seed,
            "shuffle": self.spec.shuffle,
            "window": self.spec.window,
            "tail": self.tail,
            "endless": self.endless,
            "permutation_version": self.permutation_version,
            **({"version": self.version} if self.version else {}),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> Identity:
        """Return what `to_plain` made ``plain`` of; StateInvalid where it is none."""
        flags = {name: plain.get(name) for name in ("shuffle", "endless")}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise StateInvalid(f"'shuffle' and 'endless' must be true or false, got {flags}")
        try:
            spec = OrderSpec(
                seed=integer(plain, "seed", least=-(2**63), most=2**64 - 1),
                shuffle=bool(flags["shuffle"]),
                window=integer(plain, "window", least=1),
            )
            return cls(
                table=text(plain, "table"),
                selection=text(plain, "selection"),
                rows=integer(plain, "rows"),
                spec=spec,
                tail=text(plain, "tail"),  # type: ignore[arg-type]
                endless=bool(flags["endless"]),
                permutation_version=integer(plain, "permutation_version", least=1),
                version=text(plain, "version") if "version" in plain else "",
            )
        except ValueError as error:
            raise StateInvalid(f"not the identity of an order: {error}") from error

    def of_version(self, other: Identity) -> Identity:
        """This identity, of the table version and the row selection that ``other`` is of."""
        return replace(self, table=other.table, selection=other.selection, rows=other.rows, version=other.version)

    def differences(self, other: Identity, *, words: str = "{} became {}") -> list[str]:
        """Return one line for each field in which ``other`` differs, naming both values by ``words``."""
        mine, its = self.to_plain(), other.to_plain()
        return [
            f"{name}: {words.format(self._said(name), other._said(name))}"
            for name in mine
            if name != "version" and mine[name] != its[name]
        ]

    def _said(self, name: str) -> str:
        version = f" ({self.version})" if name == "table" and self.version else ""
        return f"{self.to_plain()[name]!r}{version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of an epoch with one topology and batch size; every micro-batch below its first was consumed before."""

    micro_batch: int
    """m0: the first micro-batch."""
    step: int
    """s0: the first step of each rank."""
    num_lanes: int
    batch_size: int
    world_size: int

    def __post_init__(self) -> None:
        for one in fields(self):
            least = 0 if one.name in ("micro_batch", "step") else 1
            if getattr(self, one.name) < least:
                raise ValueError(f"a segment's {one.name} is at least {least}, got {getattr(self, one.name)}")
        if self.num_lanes > MAX_LANES:
            raise ValueError(f"an epoch has at most {MAX_LANES} lanes, got {self.num_lanes}")
        if self.num_lanes % self.world_size:
            raise ValueError(f"{self.world_size} ranks do not divide {self.num_lanes} lanes")

    @property
    def topology(self) -> tuple[int, int, int]:
        """(num_lanes, batch_size, world_size)."""
        return self.num_lanes, self.batch_size, self.world_size

    def to_plain(self) -> list[int]:
        """Return [micro_batch, step, num_lanes, batch_size, world_size]."""
        return [self.micro_batch, self.step, self.num_lanes, self.batch_size, self.world_size]

    @classmethod
    def from_plain(cls, value: object) -> Segment:
        """Return what `to_plain` made ``value`` of; StateInvalid where it is none."""
        first, step, num_lanes, batch_size, world_size = integers(value, "segments", count=5)
        try:
            return cls(micro_batch=first, step=step, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)
        except ValueError as error:
            raise StateInvalid(f"not a segment: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderState:
    """The reader state of a whole job."""

    identity: Identity
    epoch: int
    """The epoch at hand; 0 where the stream is endless (it counts its epochs itself)."""
    segments: tuple[Segment, ...]
    """At least one; the last is the one at hand."""
    step: int
    """Steps done, of this epoch; every rank has done as many."""
    base: Rest | None = None
    """What was left when the first of ``segments`` began; None: a whole epoch, or stream."""

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("a reader state has at least one segment")
        if self.epoch < 0:
            raise ValueError(f"epochs are counted from 0, got {self.epoch}")
        if self.identity.endless and self.epoch:
            raise ValueError(f"an endless stream counts its epochs itself, got epoch {self.epoch}")
        self._check_segments()
        if self.base is not None:
            self._check_base(self.base)

    def _check_segments(self) -> None:
        starts = [(segment.step, segment.micro_batch) for segment in self.segments]
        steps, numbers = [step for step, _ in starts], [number for _, number in starts]
        if steps != sorted(steps) or numbers != sorted(numbers) or self.step < steps[-1]:
            raise ValueError(f"segments begin at (step, micro-batch) {starts} and step {self.step} is at hand")
        if self.base is None and starts[0] != (0, 0):
            raise ValueError(f"the first segment of a whole epoch begins at step 0, not at {starts[0]}")
        reached = numbers[-1] + (self.step + 1 - steps[-1]) * self.segment.world_size
        if reached * max(segment.batch_size for segment in self.segments) > MAX_ROWS:
            raise ValueError(
                f"{reached} micro-batches of up to {self.segment.batch_size} rows are more than {MAX_ROWS}"
            )
        epochs = max(self.identity.epochs_at_once(one.num_lanes, one.batch_size) for one in self.segments)
        if epochs > MAX_EPOCHS_AT_ONCE:
            raise ValueError(f"a micro-batch that reaches over {epochs} epochs: at most {MAX_EPOCHS_AT_ONCE} can be")

    def _check_base(self, base: Rest) -> None:
        epochs = [left.epoch for left in base.begun]
        if not self.identity.endless and (epochs != [self.epoch] or base.next_epoch != self.epoch + 1):
            raise ValueError(f"epochs {epochs} before {base.next_epoch} cannot be the rest of epoch {self.epoch}")
        if any(left.positions and left.positions.stops[-1] > self.identity.rows for left in base.begun):
            raise ValueError(f"the rest names positions outside of an epoch of {self.identity.rows} rows")
        if any(left.num_lanes > MAX_LANES for left in base.begun):
            raise ValueError(f"an epoch has at most {MAX_LANES} lanes")

    def moved(self, *, step: int) -> ReaderState:
        """Return the state with ``step`` steps done, in the segment at hand. The segments are not checked again."""
        if step < self.segments[-1].step:
            raise ValueError(f"step {step} is before the segment that began at {self.segments[-1].step}")
        found = object.__new__(ReaderState)
        for name, value in (
            ("identity", self.identity),
            ("epoch", self.epoch),
            ("segments", self.segments),
            ("step", step),
            ("base", self.base),
        ):
            object.__setattr__(found, name, value)
        return found

    @property
    def segment(self) -> Segment:
        """The segment at hand."""
        return self.segments[-1]

    def to_plain(self) -> dict[str, object]:
        """Return the state as JSON-able values."""
        return {
            "format": FORMAT,
            "identity": self.identity.to_plain(),
            "epoch": self.epoch,
            "step": self.step,
            "segments": [segment.to_plain() for segment in self.segments],
            "base": None if self.base is None else _rest_to_plain(self.base),
        }

    @classmethod
    def from_plain(cls, plain: object) -> ReaderState:
        """Return the state that `to_plain` made ``plain`` of; StateInvalid, saying why, where it is none."""
        if not isinstance(plain, Mapping):
            raise StateInvalid(f"a reader state is a mapping, got {type(plain).__name__}")
        if plain.get("format") != FORMAT:
            raise StateInvalid(f"a reader state's 'format' is {FORMAT!r}, got {plain.get('format')!r}")
        base = plain.get("base")
        try:
            return cls(
                identity=Identity.from_plain(mapping(plain, "identity")),
                epoch=integer(plain, "epoch"),
                segments=tuple(Segment.from_plain(entry) for entry in listing(plain, "segments")),
                step=integer(plain, "step"),
                base=None if base is None else _rest_from_plain(mapping(plain, "base")),
            )
        except StateInvalid:
            raise
        except ValueError as error:
            raise StateInvalid(f"not a reader state: {error}") from error


def _rest_to_plain(rest: Rest) -> dict[str, object]:
    begun = [[left.epoch, left.num_lanes, left.rotation, left.positions.to_plain()] for left in rest.begun]
    return {"begun": begun, "next_epoch": rest.next_epoch}


def _rest_from_plain(plain: Mapping[str, object]) -> Rest:
    begun = []
    for entry in listing(plain, "begun"):
        if not isinstance(entry, (list, tuple)) or len(entry) != 4:
            raise StateInvalid(f"what is left of an epoch is [epoch, lanes, rotation, intervals], got {entry!r}")
        epoch, num_lanes, rotation = integers(entry[:3], "begun", count=3)
        positions = Intervals.from_plain(entry[3])
        begun.append(Left(epoch=epoch, positions=positions, num_lanes=num_lanes, rotation=rotation))
    return Rest(begun=tuple(begun), next_epoch=integer(plain, "next_epoch"))
