"""This module holds the identity of an order of rows, and of what is made of each row.

Equal identities mean equal orders. An identity holds digests, never a path, a column name or a credential.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from lakeckpt.core.hashing import PERMUTATION_VERSION, derive_key
from lakeckpt.core.order import OrderSpec, Tail
from lakeckpt.wire.documents import Count, Positive, as_row

__all__ = ["MAX_ROWS", "Exhausted", "Identity", "Maker", "Mixing"]

Exhausted = Literal["next_epoch", "stop", "continue"]
"""The behaviour of a mixture when a source is through its first epoch."""

MAX_ROWS = 1 << 56
"""The most rows of an epoch, and of all micro-batches of a state together: below it no product overflows 64 bits."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The transform or tokenizer that makes items of a position."""

    name: str
    """The name of a transform, or of a tokenizer; empty for whole documents."""
    how: str = ""
    """How sequences are made of tokens; empty for a transform."""
    length: Count = 0
    """Tokens of a sequence; 0 for a transform."""
    fingerprint: str = field(default="", compare=False)
    """``form:`` and the digest of a tokenizer's serialised form, or ``rows:`` and the digest of what some rows of the
    table give; empty if there is none. Ranks need not agree on it: the states of a job keep that of its first rank.
    """

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.name, self.how]))

    def differences(self, its: Maker, *, same_rows: bool) -> list[str]:
        """Return one line for each thing in which ``its`` differs, led by its name. ``same_rows``: whether both
        fingerprints are of the same rows, if they are of rows."""
        lines, words = [], "{!r} in this dataset, {!r} in the state"
        if self.length != its.length:
            lines.append(f"length: {words.format(self.length, its.length)}")
        elif self.how != its.how:
            lines.append(f"packing: {words.format(self.how, its.how)}")
        what, (mine, other) = "tokenizer" if self.length else "transform", (self.fingerprint, its.fingerprint)
        is_form = mine.startswith("form:") and other.startswith("form:")
        if is_form and mine == other:
            return lines  # whatever it is called
        if self.name != its.name:
            lines.append(f"{what}: {words.format(self.name, its.name)}")
        elif mine and other and mine != other and ((same_rows and not lines) or is_form):
            lines.append(f"{what}: {self.name!r} has the fingerprint {words.format(mine, other)}, so it is another one")
        return lines


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
    phase: Count = 0
    """The token of epoch 0 at which its first sequence begins, or would begin: of an endless stream of packed sequences
    that goes on with other row groups than it began with. Else 0."""
    permutation_version: Positive = PERMUTATION_VERSION
    version: str = field(default="", compare=False)
    """The format's name for the table version, for people; empty if it has none. It decides nothing."""
    maker: Maker | None = None
    """The maker of any number of items of a position, so that consumption depends on the data; None: a position is one
    item."""

    def __post_init__(self) -> None:
        if not 0 <= self.rows <= MAX_ROWS:
            raise ValueError(f"an epoch has 0 to {MAX_ROWS} rows, got {self.rows}")
        if self.endless and not self.rows:
            raise ValueError("an endless stream has epochs of at least one row, got 0")
        if self.tokens > MAX_ROWS or (self.rows != -(-self.tokens // self.unit) if self.unit > 1 else self.tokens):
            raise ValueError(f"{self.tokens} tokens are not packed into {self.rows} sequences of {self.unit}")
        if not 0 <= self.phase < self.unit or (self.phase and not self.endless):
            raise ValueError(f"sequences of {self.unit} tokens cannot begin at token {self.phase}")

    @property
    def digest(self) -> str:
        """A short digest of the order of rows, by which receipts name the reader that they are of."""
        return f"{derive_key(repr(self._values()))[0]:016x}"

    def rows_of(self, epoch: int) -> int:
        """Return the positions of ``epoch``: of packed sequences, those of an endless stream's epochs differ by one."""
        if self.unit == 1 or not self.endless:
            return self.rows
        low, high = (one * self.tokens - self.phase for one in (epoch, epoch + 1))
        return -(-high // self.unit) - -(-low // self.unit)

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
        """Return one line for each field of the order in which ``other`` differs, naming both values by ``words``.

        `Maker.differences` compares what makes items.
        """
        mine, its = self._values(), other._values()
        return [
            f"{name}: {words.format(self._shown(name), other._shown(name))}" for name in mine if mine[name] != its[name]
        ]

    def _values(self) -> dict[str, object]:
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.compare and one.name != "maker"}
        spec: OrderSpec = values.pop("spec")
        return values | {one.name: getattr(spec, one.name) for one in fields(spec)}

    def _shown(self, name: str) -> str:
        version = f" ({self.version})" if name == "table" and self.version else ""
        return f"{self._values()[name]!r}{version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """How the sources of a mixture take turns. A state has the first four fields: they decide which source a row comes
    from, together with the weights of its segments."""

    names: tuple[str, ...]
    seed: int
    whole: bool
    """True if a micro-batch is of one source."""
    packs: bool = False
    """True if sources take turns by documents, of which the sequences of a micro-batch are made; False: by rows."""
    weights: tuple[int, ...] = field(default=(), compare=False)
    """At the start, as `lakeckpt.core.streams.mixing.fractions` returns them."""
    exhausted: Exhausted = field(default="next_epoch", compare=False)
    schedule: tuple[tuple[int, tuple[int, ...]], ...] = field(default=(), compare=False)
    """(step, weights from this step on), in ascending order."""

    def to_plain(self) -> list[object]:
        """Return [names, seed, whole], and of a packed mixture True."""
        return [list(self.names), self.seed, self.whole, *([True] if self.packs else [])]

    @classmethod
    def from_plain(cls, plain: object) -> Mixing:
        """Return what `to_plain` made ``plain`` of; ValueError if it is nothing of the kind."""
        packs = type(plain) is list and len(plain) == 4 and plain[3] is True
        names, seed, whole = plain[:3] if type(plain) is list and len(plain) == 3 + packs else (None, None, None)
        if not (type(names) is list and all(type(one) is str for one in names) and names):
            raise ValueError(f"a mixture is [names, seed, whole], got {plain!r:.80}")
        if type(seed) is not int or type(whole) is not bool or len(set(names)) < len(names):
            raise ValueError(f"a mixture is [names, seed, whole], got {plain!r:.80}")
        return cls(names=tuple(names), seed=seed, whole=whole, packs=packs)
