"""This module compares packed batches with the table: each sequence holds the tokens that its position names.

`PackedDocuments` holds the documents of a table, as pyarrow reads them, and lays out their tokens in the order of an
epoch. So a sequence that is split, or that holds other tokens than its receipt names, is noticed at once. A token is
counted by its document and its place there: no other token of the same value makes up for it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lakeckpt.core.order import EpochLayout, Window
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.errors import ConfigError
from lakeckpt.reading.packed.documents import Documents
from lakeckpt.reading.packed.runs import DocumentRuns, part_of, runs_of
from lakeckpt.reading.packed.token_counts import place_of
from lakeckpt.testing.observed import Violation

__all__ = ["PackedDocuments", "Token", "sequences_of"]


class Token(NamedTuple):
    """A token of the table: which one of a document. Tokens that packing adds to a document count, too."""

    file: str
    row_group: int
    row: int
    token: int


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """The tokens that a position names."""

    values: list[int] = field(default_factory=list)
    tokens: dict[int, list[Token]] = field(default_factory=dict)
    """By epoch: the last sequences of an endless stream's epoch hold tokens of the next one."""


def sequences_of(item: Any) -> list[Hashable]:
    """Return the tokens of each sequence of a packed batch, without padding."""
    if not isinstance(item, Mapping) or not {"tokens", "loss_mask"} <= set(item):
        raise ConfigError(
            f"the loader gives a {type(item).__name__} without the columns tokens and loss_mask of packed sequences: "
            "say which tokens an item holds by key=function, from an item to its tokens"
        )
    every, real = np.asarray(item["tokens"]), np.asarray(item["loss_mask"])
    return [tuple(tokens[mask].tolist()) for tokens, mask in zip(every, real, strict=True)]


class PackedDocuments:
    """The documents that ``dataset`` packs. ``groups``: the tokens of each document that has any, by its row, for each
    row group of the table."""

    def __init__(self, dataset: LakeDataset, groups: Sequence[Mapping[int, list[int]]]) -> None:
        self._index, self._identity = dataset.table.index, dataset.identity
        self._groups = groups
        self._documents = [_documents(group) for group in groups]
        self._windows: dict[tuple[Hashable, int], list[_Sequence]] = {}

    def every(self) -> Counter[Hashable]:
        """Count the tokens of an epoch: each once."""
        return Counter(
            token
            for group, documents in enumerate(self._groups)
            for row, tokens in documents.items()
            for token in self._named(group, row, 0, len(tokens))
        )

    def tokens(self, found: list[Hashable], receipt: Receipt, plan: Plan) -> Iterator[tuple[int, list[Token]]]:
        """Yield (epoch, tokens) of the sequences that ``receipt`` names; ``plan`` names the layouts of epochs.

        Violation if ``found``, the tokens of each sequence of the batch, are not these.
        """
        named = [one for span in receipt.spans for one in self._at(span.epoch, span.start, span.stop, plan)]
        expected = [tuple(one.values) for one in named]
        if found != expected:
            differ = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
            what = f"it has {len(found)} sequences, not {len(expected)}"
            if differ is not None:
                what = f"sequence {differ} holds the tokens {found[differ]!r}, not {expected[differ]!r}"
            raise Violation(f"a batch does not hold the sequences that its receipt names: {what}; {receipt}")
        for one in named:
            yield from one.tokens.items()

    def _at(self, epoch: int, start: int, stop: int, plan: Plan) -> Iterator[_Sequence]:
        """Yield the sequences [start, stop) of an epoch."""
        num_lanes, rotation = plan.deal.layout(epoch)
        identity = self._identity
        counts = np.array([len(documents.tokens) for documents in self._documents], np.int64)
        layout = EpochLayout.build(
            counts, identity.spec, epoch, num_lanes, rotation, unit=identity.unit, endless=identity.endless
        )
        for window in layout.windows(start, stop):
            key = layout.identity, window.start
            if key not in self._windows:
                self._windows[key] = self._laid_out(layout, window)
            low, high = max(start, window.start), min(stop, window.stop)
            yield from self._windows[key][low - window.start : high - window.start]

    def _laid_out(self, layout: EpochLayout, window: Window) -> list[_Sequence]:
        parts = [part_of(self._documents[part.group], part, labels=False, masks_ends=True) for part in window.fragments]
        runs = DocumentRuns.of(runs_of(parts, window, layout.unit), parts, window, layout.unit)
        begins = np.cumsum([layout.first + window.start * layout.unit, *(part.rows for part in window.fragments)])
        epochs = (layout.epoch + (begins >= layout.begins[-1])).tolist()
        found = [_Sequence() for _ in range(window.rows)]
        columns = (runs.positions - window.start, runs.fragments, runs.groups, runs.rows, runs.starts, runs.stops)
        for place, part, group, row, start, stop in zip(*(column.tolist() for column in columns), strict=True):
            found[place].values += self._groups[group][row][start:stop]
            found[place].tokens.setdefault(epochs[part], []).extend(self._named(group, row, start, stop))
        return found

    def _named(self, group: int, row: int, start: int, stop: int) -> Iterator[Token]:
        file, row_group = place_of(self._index, group)
        return (Token(file, row_group, row, token) for token in range(start, stop))


def _documents(group: Mapping[int, list[int]]) -> Documents:
    return Documents(
        tokens=np.array(list(itertools.chain(*group.values())), np.int64),
        ends=np.cumsum([0, *map(len, group.values())]),
        rows=np.array(list(group), np.int64),
    )
