"""This module cuts the documents of a window into the runs of its sequences.

A document that a sequence cuts becomes several *runs*, each of which is copied once to where it belongs. If the
window is shuffled, the documents are put in the order of a keyed hash, and the sequences that they are cut into in the
order of another one: otherwise a long document would fill a batch.

All here is a pure function of the documents and of the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.core.hashing import derive_key, permutation
from lakeckpt.core.order import Fragment, Window
from lakeckpt.reading.packed.documents import Documents
from lakeckpt.reading.packed.sequences import NO_LABEL

__all__ = ["DocumentRuns", "FragmentDocuments", "TokenRuns", "cuts_of", "part_of", "runs_of"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentDocuments:
    """The documents of one fragment of a window; int64, shape (documents,) each. The first and the last document may
    go on outside of the fragment."""

    group: int
    """The row group."""
    tokens: Array
    """The tokens of the fragment."""
    bounds: Int64Array
    """Where each document begins among these tokens, and their end: shape (documents + 1,)."""
    origins: Int64Array
    """Where each document begins if it is not cut: less than 0 if it begins before the fragment."""
    rows: Int64Array
    """The row of each document in the row group."""
    follows: Int64Array | None
    """The label of the last token of each document within the fragment; None: no labels are wanted."""
    goes_on: bool
    """True if the fragment cuts its last document, which goes on in the next window."""


def part_of(whole: Documents, fragment: Fragment, *, labels: bool, masks_ends: bool) -> FragmentDocuments:
    """Return the documents of a fragment, which is of the row group of ``whole``. They are cut at both ends."""
    tokens, ends = whole.tokens, whole.ends
    first = int(np.searchsorted(ends, fragment.start, side="right")) - 1
    last = int(np.searchsorted(ends, fragment.stop, side="left"))
    bounds = np.clip(ends[first : last + 1], fragment.start, fragment.stop)
    is_end = bounds[1:] == ends[first + 1 : last + 1]
    return FragmentDocuments(
        group=fragment.group,
        tokens=tokens[fragment.start : fragment.stop],
        bounds=bounds - fragment.start,
        origins=ends[first:last] - fragment.start,
        rows=whole.rows[first:last],
        follows=_follows(tokens, bounds, is_end & masks_ends) if labels else None,
        goes_on=not is_end.all(),
    )


def _follows(tokens: Array, bounds: Int64Array, is_masked: npt.NDArray[np.bool_]) -> Int64Array:
    """Return the token after each document, unless it ``is_masked`` or none is known."""
    follows = np.full(len(bounds) - 1, NO_LABEL, np.int64)
    known = np.flatnonzero((bounds[1:] < len(tokens)) & ~is_masked)
    follows[known] = tokens[bounds[1:][known]]
    return follows


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRuns:
    """The runs of a window's sequences, in the order in which they are delivered; int64, shape (runs,) each."""

    places: Int64Array
    """The part of each; one past the last part is padding."""
    starts: Int64Array
    """Where it begins among the part's tokens."""
    lengths: Int64Array
    begins: Int64Array
    """Where it begins among the tokens of the window's sequences."""
    documents: Int64Array
    """The document of each, over all parts; -1: padding."""
    ends: npt.NDArray[np.bool_]
    """True if the run is the end of its document, or padding."""

    @property
    def padding(self) -> int:
        """The number of the run that is padding; -1: none."""
        found = np.flatnonzero(self.documents < 0)
        return int(found[0]) if len(found) else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRuns:
    """The tokens of documents that stand in sequences, in the order of delivery; int64, shape (runs,) each."""

    positions: Int64Array
    """The sequence of each run."""
    fragments: Int64Array
    """The number of its fragment in the window."""
    groups: Int64Array
    rows: Int64Array
    """The row of the document in its row group, of those that the decoder counts."""
    starts: Int64Array
    """The first of the run's tokens in its document, those that packing adds before and after it included."""
    stops: Int64Array

    @classmethod
    def of(cls, runs: TokenRuns, parts: Sequence[FragmentDocuments], window: Window, length: int) -> DocumentRuns:
        """Name ``runs``, which `runs_of` made of the other arguments. Padding has no name."""
        real = runs.documents >= 0
        places, documents = runs.places[real], runs.documents[real]
        starts = runs.starts[real] - np.concatenate([part.origins for part in parts])[documents]
        return cls(
            positions=window.start + runs.begins[real] // length,
            fragments=places,
            groups=np.array([part.group for part in parts])[places],
            rows=np.concatenate([part.rows for part in parts])[documents],
            starts=starts,
            stops=starts + runs.lengths[real],
        )


def runs_of(parts: Sequence[FragmentDocuments], window: Window, length: int) -> TokenRuns:
    """Return the runs that ``parts`` become in the sequences of ``window``."""
    starts = np.concatenate([part.bounds[:-1] for part in parts])
    lengths = np.concatenate([np.diff(part.bounds) for part in parts])
    places = np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts])
    order, delivered = _orders(window, len(lengths))
    count = window.rows
    ends = np.cumsum(lengths[order])
    begins, total = ends - lengths[order], int(ends[-1]) if len(ends) else 0
    cuts, document = cuts_of(begins, np.arange(count) * length)
    inner = cuts - begins[document]
    sizes = np.diff(np.append(cuts, total))
    is_end = cuts + sizes == ends[document]
    number = order[document]
    if total < count * length:  # padding is one more run
        cuts, sizes = np.append(cuts, total), np.append(sizes, count * length - total)
        number, inner, is_end = np.append(number, -1), np.append(inner, 0), np.append(is_end, True)
    final = _taken(np.flatnonzero(cuts % length == 0), len(cuts), delivered)
    lengths = sizes[final]
    return TokenRuns(
        places=np.append(places, len(parts))[number][final],
        starts=(np.append(starts, 0)[number] + inner)[final],
        lengths=lengths,
        begins=np.cumsum(lengths) - lengths,
        documents=number[final],
        ends=is_end[final],
    )


def _orders(window: Window, documents: int) -> tuple[Int64Array, Int64Array]:
    """Return the order of the documents before they are cut, and the order in which sequences are delivered."""
    if window.key is None:
        return np.arange(documents), np.arange(window.rows)
    return permutation(window.key, documents), permutation(derive_key("sequences", *window.key), window.rows)


def cuts_of(begins: Int64Array, grid: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return where runs begin, ascending: where a document or a sequence does; and the document of each.

    Both are ascending, and no two documents begin at one place.
    """
    both = np.concatenate([begins, grid])
    merged = np.argsort(both, kind="stable")  # of two ascending parts: it merges them
    cuts = both[merged]
    is_new = np.diff(cuts, prepend=-1) > 0
    return cuts[is_new], (np.cumsum(merged < len(begins)) - 1)[is_new]


def _taken(firsts: Int64Array, count: int, delivered: Int64Array) -> Int64Array:
    """Return the runs of the sequences ``delivered``, one sequence after another.

    ``firsts`` is the first run of each sequence, and ``count`` the number of runs.
    """
    counts = np.diff(np.append(firsts, count))[delivered]
    return np.repeat(firsts[delivered] - (np.cumsum(counts) - counts), counts) + np.arange(count)
