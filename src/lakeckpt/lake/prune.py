"""Can a filter be true, false, or null of any row of a row group?  Told from bounds, for many row groups at once.

The tree of a filter is walked with three answers for each part: whether any row may make it true, false, null. Logic
combines them as Kleene's does; parts of which nothing is known may be anything. So what cannot happen really cannot:
where a filter cannot be true no row stays, where it cannot be false or null every row does.

Pure: it reads nothing, and never looks at a value of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.lake.expressions import COMPARISONS, Call, Column, Constant, Node
from lakeckpt.lake.statistics import Bounds

__all__ = ["Verdicts", "verdicts"]

Flags = npt.NDArray[np.bool_]
_MOST_VALUES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdicts:
    """Of each of G row groups, whether some row may make the filter true, false, null: bool, shape (G,) each."""

    true: Flags
    false: Flags
    null: Flags

    @property
    def none(self) -> Flags:
        """Where no row stays."""
        return ~self.true

    @property
    def every(self) -> Flags:
        """Where every row stays."""
        return self.true & ~self.false & ~self.null


def verdicts(node: Node, bounds: Mapping[str, Bounds], groups: int) -> Verdicts:
    """What ``node`` may be in each of ``groups`` row groups. ``bounds`` are those of columns, as far as known."""
    if isinstance(node, Column):
        return _of_flag(node, bounds, groups)
    if isinstance(node, Constant):
        return _of_constant(node, groups)
    if node.name in ("and_kleene", "or_kleene"):
        parts = [verdicts(one, bounds, groups) for one in node.arguments]
        return _conjunction(parts) if node.name == "and_kleene" else _inverted(_conjunction(map(_inverted, parts)))
    if node.name == "invert":
        return _inverted(verdicts(node.arguments[0], bounds, groups))
    known = _known(node, bounds)
    if known is None:
        return _anything(groups)
    try:
        if node.name in COMPARISONS:
            return _compared(node.name, known, node.arguments[1])
        if node.name == "is_in":
            return _contained(node, known)
    except (pa.ArrowException, ValueError, TypeError):
        return _anything(groups)
    if node.name in ("is_null", "is_valid") and not node.options:
        found = _nulls(known)
        return found if node.name == "is_null" else _inverted(found)
    return _anything(groups)


def _anything(groups: int) -> Verdicts:
    every = np.ones(groups, np.bool_)
    return Verdicts(true=every, false=every, null=every)


def _inverted(one: Verdicts) -> Verdicts:
    return Verdicts(true=one.false, false=one.true, null=one.null)


def _conjunction(parts: Iterable[Verdicts]) -> Verdicts:
    first, *others = parts
    for one in others:
        first = Verdicts(
            true=first.true & one.true,
            false=first.false | one.false,
            null=(first.null & (one.true | one.null)) | (one.null & (first.true | first.null)),
        )
    return first


def _known(node: Call, bounds: Mapping[str, Bounds]) -> Bounds | None:
    """The bounds of the column that a call looks at, beside constants."""
    if not node.arguments or not isinstance(node.arguments[0], Column) or len(node.arguments[0].path) != 1:
        return None
    if not all(isinstance(one, Constant) for one in node.arguments[1:]):
        return None
    return bounds.get(node.arguments[0].path[0])


def _of_constant(node: Constant, groups: int) -> Verdicts:
    if node.scalar.is_valid and not pa.types.is_boolean(node.scalar.type):
        return _anything(groups)
    value = node.scalar.as_py()
    full = [np.full(groups, value is which, np.bool_) for which in (True, False, None)]
    return Verdicts(true=full[0], false=full[1], null=full[2])


def _of_flag(node: Column, bounds: Mapping[str, Bounds], groups: int) -> Verdicts:
    known = bounds.get(node.path[0]) if len(node.path) == 1 else None
    if known is None or not pa.types.is_boolean(known.low.type):
        return _anything(groups)
    true = pa.scalar(True)
    return _compared("equal", known, Constant(plain=("bool", True), scalar=true))


def _compared(name: str, known: Bounds, constant: Node) -> Verdicts:
    assert isinstance(constant, Constant)
    if not constant.scalar.is_valid:
        none = np.zeros(len(known.rows), np.bool_)
        return Verdicts(true=none, false=none, null=~none)
    if constant.plain[0] == "float" and constant.plain[-1] == "nan":
        return _anything(len(known.rows))
    value = _as_bound(constant.scalar)
    if name == "not_equal":
        return _inverted(_compared("equal", known, constant))
    if name == "equal":
        true = _flags("less_equal", known.low, value) & _flags("greater_equal", known.high, value)
        false = ~(_flags("equal", known.low, value, unknown=False) & _flags("equal", known.high, value, unknown=False))
    elif name in ("less", "less_equal"):
        true = _flags(name, known.low, value)
        false = _flags("greater_equal" if name == "less" else "greater", known.high, value)
    else:
        true = _flags(name, known.high, value)
        false = _flags("less_equal" if name == "greater" else "less", known.low, value)
    return _with_nulls(true, false | known.may_be_nan, known)


def _with_nulls(true: Flags, false: Flags, known: Bounds) -> Verdicts:
    """The verdicts of a comparison, whose answers ``true`` and ``false`` are of values and null of nulls."""
    some = known.nulls != known.rows
    return Verdicts(true=true & some, false=false & some, null=known.nulls != 0)


def _contained(node: Call, known: Bounds) -> Verdicts:
    """``is_in``: never null; null is in the values or it is not. Values are what they are in the column's type, to
    which the kernel casts them: 0.1 is in a float32 column that holds what is nearest to it."""
    holds_null = any(not one.scalar.is_valid for one in node.values)
    values = [_as_bound(one.scalar).cast(known.low.type) for one in node.values if one.scalar.is_valid]
    if node.options or any(one.plain[0] == "float" and one.plain[-1] == "nan" for one in node.values):
        return _anything(len(known.rows))
    true, only = np.zeros((2, len(known.rows)), np.bool_)
    if len(values) > _MOST_VALUES:
        ends = pc.min_max(pa.array(values, values[0].type))
        true = _flags("less_equal", known.low, ends["max"]) & _flags("greater_equal", known.high, ends["min"])
    else:
        for value in values:
            true |= _flags("less_equal", known.low, value) & _flags("greater_equal", known.high, value)
            only |= _flags("equal", known.low, value, unknown=False) & _flags("equal", known.high, value, unknown=False)
    only &= not pa.types.is_floating(known.low.type)  # -0.0 equals 0.0, and is not in [0.0]
    some, nulls = known.nulls != known.rows, known.nulls != 0
    return Verdicts(
        true=(true & some) | (nulls & holds_null),
        false=(~only & some) | (nulls & (not holds_null)),
        null=np.zeros(len(known.rows), np.bool_),
    )


def _nulls(known: Bounds) -> Verdicts:
    return Verdicts(true=known.nulls != 0, false=known.nulls != known.rows, null=np.zeros(len(known.rows), np.bool_))


def _as_bound(scalar: pa.Scalar) -> pa.Scalar:
    """Text as its bytes, as bounds of text are."""
    kind = scalar.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.scalar(scalar.as_py().encode(), pa.binary())
    return pa.scalar(scalar.as_py(), pa.binary()) if pa.types.is_large_binary(kind) else scalar


def _flags(name: str, bounds: pa.Array, value: pa.Scalar, *, unknown: bool = True) -> Flags:
    """The comparison of each bound with ``value``; ``unknown`` where there is no bound."""
    found = pc.call_function(name, [bounds, value])
    return np.asarray(pc.fill_null(found, unknown).to_numpy(zero_copy_only=False), np.bool_)
