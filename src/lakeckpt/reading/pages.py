"""How much memory can a column chunk decode to?  Told from the headers of its pages, before anything is decompressed.

A footer may lie about sizes, and dictionaries and run lengths make megabytes of bytes, so neither a footer's totals nor
a file's size bound what decoding allocates. The headers of pages do: each says how large its page is decompressed
(which the decompressor holds it to), how many values it has, and how they are encoded. `survey` adds that up.

Of values it looks at short dictionaries alone, and, where a row may have any number of texts, and they could be too
large, at how much of them is repeated from those before (`lakeckpt.reading.prefixes`). What it cannot read raises
``ValueError`` with what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from lakeckpt.lake.column_chunks import ChunkFacts
from lakeckpt.lake.thrift import read_struct
from lakeckpt.reading.prefixes import repeated_bytes

__all__ = ["Leaf", "Survey", "survey"]

_BYTE_ARRAY = 6
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of one decoded value, by physical type."""
_MOST_EXPANSION = {0: 1, 1: 24, 5: 256, 7: 256}
"""How often larger than its bytes a page can be, by codec; the others know no bound that is of use."""
_DICTIONARY_PAGE, _DATA_PAGES = 2, {0: 5, 3: 8}
"""The page type of dictionaries; of data pages, and in which field their own header stands."""
_PLAIN, _LEVELS, _DELTA_LENGTHS, _DELTA_BYTES = 0, 3, 6, 7
_OF_DICTIONARY = frozenset((2, 8))
_WANTED: dict[int, Any] = {1: None, 2: None, 3: None, 7: {1: None}}
_WANTED |= {5: dict.fromkeys((1, 2, 3, 4)), 8: dict.fromkeys((1, 4, 5, 6, 7))}
_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_FEW_ENTRIES, _SMALL_BYTES, _SMALL_NESTED_BYTES = 4096, 2 << 20, 64 << 20
"""The longest entry of a dictionary is looked for where it has so few, and is no larger than that; than the last, where
a row may have any number of them, so that nothing else bounds what a few rows decode to. Then pages, too, are looked
into where that takes no more."""
_MANY_ENTRIES = 1 << 18
"""The same where pages are looked into: walking through them takes time, and the dictionaries of writers, which are of
a megabyte, have fewer."""
_MAX_HEADER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A column of the lowest level, by what the schema says of it."""

    name: str
    """The column of the table that it is part of."""
    nested: bool
    """Whether a row may have several of its values, or none."""
    width: int
    """Bytes of a value of a fixed-width type beyond what its physical type says (decimals, fixed-size binaries)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one column chunk decodes to, at most."""

    certain_bytes: int
    """What is known without knowing any value."""
    looked_up: int
    """Values that repeat texts of a dictionary, or parts of the texts before them: how long they are is not known."""
    longest_bytes: int
    """The longest that each of them can be."""
    page_bytes: int
    """The largest page, decompressed."""
    by_dictionary: bool
    """Whether they repeat texts of a dictionary, and no page is of parts of the texts before."""

    @property
    def most_bytes(self) -> int:
        """The most that it can decode to."""
        return self.certain_bytes + self.looked_up * self.longest_bytes


def survey(facts: ChunkFacts, leaf: Leaf, chunk: memoryview, *, rows: int, plenty: int) -> Survey:
    """Survey a column chunk of ``rows`` rows, whose bytes are ``chunk``.

    Where the footer's numbers cannot lie about it, and it is certainly no larger than ``plenty`` bytes, its pages are
    not walked. ``ValueError`` says what the chunk's own headers contradict.
    """
    if facts.values < 0 or (not leaf.nested and facts.values != rows):
        raise ValueError(f"its footer says that it has {facts.values} values in {rows} rows")
    width = max(leaf.width, _WIDTHS.get(facts.physical_type, 0))
    expanded = len(chunk) * _MOST_EXPANSION.get(facts.codec, 1 << 40)
    if facts.physical_type != _BYTE_ARRAY and not leaf.nested and expanded <= plenty:
        return Survey(
            certain_bytes=rows * width,
            looked_up=0,
            longest_bytes=0,
            page_bytes=expanded,
            by_dictionary=False,
        )
    found = _walked(facts, leaf, chunk, width)
    if leaf.nested and found.looked_up and not found.by_dictionary and found.most_bytes > plenty:
        return _walked(facts, leaf, chunk, width, look_into=max(plenty, _SMALL_NESTED_BYTES))
    return found


def _walked(facts: ChunkFacts, leaf: Leaf, chunk: memoryview, width: int, look_into: int = 0) -> Survey:
    """``look_into``: how large pages may be, and their values in memory, whose prefixes are added up."""
    at = values = content = looked_up = longest = largest = dictionary = 0
    prefixed = has_dictionary = False
    while at < len(chunk) and values < facts.values:
        header, body = read_struct(chunk[: at + _MAX_HEADER_BYTES], at, wanted=_WANTED)
        kind, size, stored = (header.get(field) for field in (1, 2, 3))
        if type(size) is not int or type(stored) is not int or size < 0 or not 0 <= stored <= len(chunk) - body:
            raise ValueError(f"a page at byte {at} of its column chunk claims {stored} bytes, decompressed {size}")
        page, at, largest = chunk[body : body + stored], body + stored, max(largest, size)
        if kind == _DICTIONARY_PAGE:
            if has_dictionary:
                raise ValueError(f"it has a second dictionary before byte {at} of its column chunk")
            has_dictionary = True
            small = size <= (_SMALL_NESTED_BYTES if leaf.nested else _SMALL_BYTES)
            entries = _entries(header)
            few = entries <= (_MANY_ENTRIES if look_into else _FEW_ENTRIES)
            look = facts.physical_type == _BYTE_ARRAY and small and few
            longest_entry = _longest_entry(page, facts.codec, size, entries) if look else size
            dictionary = max(dictionary, longest_entry)
        elif kind in _DATA_PAGES:
            said = header.get(_DATA_PAGES[kind])
            count = said.get(1) if isinstance(said, dict) else None
            if not isinstance(said, dict) or type(count) is not int or count < 0:
                raise ValueError(f"a page before byte {at} of its column chunk claims {count} values")
            values += count
            encoding = said.get(2 if kind == 0 else 4)
            if encoding in _OF_DICTIONARY:
                looked_up += count
            elif encoding in (_PLAIN, _DELTA_LENGTHS):
                content += size
            else:
                prefixed = True
                repeated = None
                if encoding == _DELTA_BYTES and max(size, 100 * count) <= look_into:
                    repeated = _repeated(page, kind, said, facts.codec, size, count)
                if repeated is None:
                    looked_up, longest = looked_up + count, max(longest, size)
                else:
                    content += size + repeated
    if values != facts.values:
        raise ValueError(f"its pages hold {values} values, but its footer says {facts.values}")
    if facts.physical_type != _BYTE_ARRAY or leaf.width:
        # Levels of nested values, and the offsets of lists.
        return Survey(
            certain_bytes=values * (width + (8 if leaf.nested else 0)),
            looked_up=0,
            longest_bytes=0,
            page_bytes=largest,
            by_dictionary=False,
        )
    return Survey(
        certain_bytes=content + values * (12 if leaf.nested else 4),
        looked_up=looked_up,
        longest_bytes=max(longest, dictionary),
        page_bytes=largest,
        by_dictionary=not prefixed,
    )


def _repeated(page: memoryview, kind: Any, said: dict[int, Any], codec: int, size: int, count: int) -> int | None:
    """What the texts of a page of lists repeat of those before them, in bytes; None where it cannot be told."""
    try:
        if kind == 0:
            content = _decompressed(page, codec, size)
            if any(said.get(field) != _LEVELS for field in (3, 4)):
                return None
            at = 0
            for _ in range(2):  # levels of repetition, and of definition: what is repeated has both
                at += 4 + int.from_bytes(content[at : at + 4], "little")
            return repeated_bytes(content[at:], count)
        levels = sum(int(said[field]) for field in (5, 6))
        if not 0 <= levels <= min(size, len(page)):
            return None
        is_plain = said.get(7) is False
        values = page[levels:] if is_plain else _decompressed(page[levels:], codec, size - levels)
        return repeated_bytes(values, count)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return None  # decoding it will say so


def _decompressed(page: memoryview, codec: int, size: int) -> memoryview:
    name = _CODECS[codec]
    return memoryview(page if name is None else pa.Codec(name).decompress(page, decompressed_size=size)).cast("B")


def _entries(header: dict[int, Any]) -> int:
    said = header.get(7)
    count = said.get(1) if isinstance(said, dict) else None
    return count if type(count) is int and count >= 0 else _MANY_ENTRIES + 1


def _longest_entry(page: memoryview, codec: int, size: int, entries: int) -> int:
    """The longest entry of a dictionary of so many texts, in bytes; ``size``, that of the page, where it cannot be
    told. What lies behind the last is never decoded."""
    if codec not in _CODECS:
        return size
    try:
        plain = _decompressed(page, codec, size)
    except (pa.ArrowException, OSError, ValueError):
        return size  # decoding it will say so
    at = longest = 0
    for _ in range(entries):
        if at + 4 > len(plain):
            break
        length = int.from_bytes(plain[at : at + 4], "little")
        longest = max(longest, length)
        at += 4 + length
    return min(size, longest)
