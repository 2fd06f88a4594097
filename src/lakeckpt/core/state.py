"""This module holds the reader state: where the whole job is in its data. It is the same on every rank.

A state names the order it belongs to (`Identity`), the segments of the epoch at hand, and how many steps of it are
done. From these, `lakeckpt.core.plan` computes everything else: which rank gets which rows next, and which rows have
been consumed. States are values: every change makes a new state.

A state never lists single rows, and never holds a path, a column name or a credential, only digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from lakeckpt.core.hashing import PERMUTATION_VERSION, derive_key
from lakeckpt.core.lanes import Rest, Tail
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.streams.mixing import Share
from lakeckpt.errors import StateError
from lakeckpt.wire.documents import Count, Positive, as_row, from_plain, to_plain

__all__ = [
    "FORMAT",
    "MAX_EPOCH",
    "MAX_LANES",
    "MAX_ROWS",
    "Identity",
    "ReaderState",
    "Segment",
]

FORMAT = "lakeckpt.reader/1"
"""The name and major version of a plain state."""

MAX_EPOCH = 1 << 31
"""The last epoch that can be read; an endless stream has no limit."""

MAX_LANES = 1 << 20
"""The most lanes of an epoch: planning takes time and memory in proportion to them."""

MAX_ROWS = 1 << 56
"""The most rows of an epoch, and of all micro-batches of a state together: below it no product overflows 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that determines the order of rows, except the segments: equal identities mean equal orders."""

    table: str
    """Digest of the pinned file listing (hex)."""
    selection: str
    """Digest of the row selection (hex); empty: all rows."""
    rows: Count
    """Positions of an epoch: rows, or packed sequences (of an endless stream, those of epoch 0)."""
    spec: OrderSpec
    tail: Tail
    endless: bool
    unit: Positive = 1
    """Tokens of a packed sequence; 1: rows are read."""
    tokens: Count = 0
    """Tokens of an epoch of packed sequences; 0: rows are read."""
    permutation_version: Positive = PERMUTATION_VERSION
    version: str = field(default="", compare=False)
    """The format's name for the table version, for people; empty where it has none. It decides nothing."""

    def __post_init__(self) -> None:
        if not 0 <= self.rows <= MAX_ROWS:
            raise ValueError(f"an epoch has 0 to {MAX_ROWS} rows, got {self.rows}")
        if self.endless and not self.rows:
            raise ValueError("an endless stream has epochs of at least one row, got 0")
        if self.tokens > MAX_ROWS or (self.rows != -(-self.tokens // self.unit) if self.unit > 1 else self.tokens):
            raise ValueError(f"{self.tokens} tokens are not packed into {self.rows} sequences of {self.unit}")

    @property
    def digest(self) -> str:
        """A short digest of the order of rows, by which receipts name the reader that they are of."""
        return f"{derive_key(repr(self._values()))[0]:016x}"

    def rows_of(self, epoch: int) -> int:
        """Return the positions of ``epoch``: of packed sequences, those of an endless stream's epochs differ by one."""
        if self.unit == 1 or not self.endless:
            return self.rows
        return -(-(epoch + 1) * self.tokens // self.unit) - -(-epoch * self.tokens // self.unit)

    def of_version(self, other: Identity) -> Identity:
        """Return this identity with the table version and the row selection of ``other``."""
        return replace(
            self,
            table=other.table,
            selection=other.selection,
            rows=other.rows,
            tokens=other.tokens,
            version=other.version,
        )

    def differences(self, other: Identity, *, words: str = "{} became {}") -> list[str]:
        """Return one line for each field in which ``other`` differs, naming both values by ``words``."""
        mine, its = self._values(), other._values()
        return [
            f"{name}: {words.format(self._shown(name), other._shown(name))}" for name in mine if mine[name] != its[name]
        ]

    def _values(self) -> dict[str, object]:
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        spec: OrderSpec = values.pop("spec")
        return values | {one.name: getattr(spec, one.name) for one in fields(spec)}

    def _shown(self, name: str) -> str:
        version = f" ({self.version})" if name == "table" and self.version else ""
        return f"{self._values()[name]!r}{version}"


@as_row
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
    share: Share | None = None
    """The share of this reader in the micro-batches of a mixture; None: micro-batches are all its own."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "step", "num_lanes", "batch_size", "world_size"):
            least = 0 if name in ("micro_batch", "step") else 1
            if getattr(self, name) < least:
                raise ValueError(f"a segment's {name} is at least {least}, got {getattr(self, name)}")
        if self.num_lanes > MAX_LANES:
            raise ValueError(f"an epoch has at most {MAX_LANES} lanes, got {self.num_lanes}")
        if self.num_lanes % self.world_size:
            raise ValueError(f"{self.world_size} ranks do not divide {self.num_lanes} lanes")

    @property
    def topology(self) -> tuple[int, int, int]:
        """(num_lanes, batch_size, world_size)."""
        return self.num_lanes, self.batch_size, self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderState:
    """The reader state of a whole job."""

    identity: Identity
    epoch: Count
    """The epoch at hand; 0 where the stream is endless (it counts its epochs itself)."""
    segments: tuple[Segment, ...]
    """At least one; the last is the one at hand."""
    step: Count
    """Steps done, of this epoch; every rank has done as many."""
    base: Rest | None = None
    """The rest when the first of ``segments`` began; None: a whole epoch, or stream."""

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("a reader state has at least one segment")
        if self.epoch < 0:
            raise ValueError(f"epochs are counted from 0, got {self.epoch}")
        if any(one.share for one in self.segments) and not self.identity.endless:
            raise ValueError("a source of a mixture is an endless stream")
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

    def _check_base(self, base: Rest) -> None:
        epochs = [left.epoch for left in base.begun]
        if not self.identity.endless and (epochs != [self.epoch] or base.next_epoch != self.epoch + 1):
            raise ValueError(f"epochs {epochs} before {base.next_epoch} cannot be the rest of epoch {self.epoch}")
        if any(left.positions and left.positions.stops[-1] > self.identity.rows for left in base.begun):
            raise ValueError(f"the rest names positions outside of an epoch of {self.identity.rows} rows")

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
        return {"format": FORMAT, **to_plain(self)}

    @classmethod
    def from_plain(cls, plain: object) -> ReaderState:
        """Return the state that `to_plain` made ``plain`` of; StateError, saying why, where it is none."""
        if not isinstance(plain, Mapping):
            raise StateError(f"a reader state is a mapping, got {type(plain).__name__}")
        values = dict(plain)
        if values.pop("format", None) != FORMAT:
            raise StateError(f"a reader state's 'format' is {FORMAT!r}, got {plain.get('format')!r}")
        found: ReaderState = from_plain(cls, values, "a reader state", error=StateError)
        return found
