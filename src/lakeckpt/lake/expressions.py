"""What does a filter say, apart from how it was spelled?  A tree of our own, in a normal form, with a digest.

`parse` reads a pyarrow expression into the tree: columns by name, constants by value, functions by name with their
options. It reads the form in which pyarrow itself stores expressions (a record batch of constants and a list of names),
never their text, in which long lists of values are shortened. What means the same is one tree: parts of an ``and`` or
``or`` are sorted and each there once, constants stand on the right, a constant is told by its value and not by its
width, the values of a list are a set. The digest depends on the tree alone, not on pyarrow's release.

Functions are those of `FUNCTIONS`: of one row at a time, and with the same answer every time. Never evaluates anything.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.errors import ConfigError
from lakeckpt.lake.constants import Constant, constant, fitted, plain_of, spelled
from lakeckpt.wire.codec import dumps

__all__ = [
    "COMPARISONS",
    "FUNCTIONS",
    "Call",
    "Column",
    "Constant",
    "Node",
    "columns_of",
    "compiled",
    "digest_of",
    "joined",
    "parse",
    "text_of",
    "type_of",
]

DIGEST_BYTES = 16
FLIPPED = {
    "equal": "equal",
    "not_equal": "not_equal",
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
}
COMPARISONS = {
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
_ARITHMETIC = (
    "abs add divide multiply negate power shift_left shift_right sqrt subtract modulo remainder ln log10 log1p log2"
)
_OTHERS = """
    and_kleene or_kleene and or xor and_not and_not_kleene invert is_in is_null is_valid is_nan is_finite is_inf
    true_unless_null cast coalesce if_else case_when struct_field list_value_length list_element bit_wise_and
    bit_wise_or bit_wise_xor bit_wise_not sign ceil floor round trunc max_element_wise min_element_wise
    starts_with ends_with match_substring match_like match_substring_regex find_substring count_substring
    binary_length utf8_length utf8_lower utf8_upper ascii_lower ascii_upper utf8_trim_whitespace
    ascii_trim_whitespace utf8_slice_codeunits string_is_ascii utf8_is_alpha utf8_is_digit utf8_is_lower
    utf8_is_upper utf8_is_alnum year month day day_of_week day_of_year iso_week iso_year quarter hour minute second
    millisecond microsecond nanosecond subsecond is_leap_year floor_temporal ceil_temporal round_temporal
    days_between hours_between minutes_between seconds_between years_between weeks_between
"""
FUNCTIONS = frozenset(
    [*COMPARISONS, *_OTHERS.split(), *(name + end for name in _ARITHMETIC.split() for end in ("", "_checked"))]
)
"""The functions of pyarrow that a filter may call."""

_OPERATORS = {
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
}
_DEFAULTS = (("bool", False), ("int", 0), ("null",))
_VERSION = (1, 0)
_MOST_NODES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column, or a field of a struct: the names on the way to it."""

    path: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function of pyarrow, applied; ``values`` are those of an ``is_in``, ``options`` all others, sorted by name."""

    name: str
    arguments: tuple[Node, ...]
    options: tuple[tuple[str, object], ...] = ()
    values: tuple[Constant, ...] = ()


Node = Column | Constant | Call


def parse(expression: pc.Expression, schema: pa.Schema) -> Node:
    """The tree of ``expression`` over a table of ``schema``, in normal form.

    Raises `ConfigError` for what a filter cannot hold: functions that are not in `FUNCTIONS`, constants of nested
    types, columns by number. Columns that the schema does not have are left for the caller to find.
    """
    try:
        return _normal(_fitted(_Parser(expression).node(), schema))
    except RecursionError:
        raise ConfigError(
            "the filter has too many parts inside one another: use isin([...]), or tuples, and fewer of either"
        ) from None


def compiled(node: Node) -> pc.Expression | None:
    """The expression of a tree of comparisons, ``is_in``, ``is_null``, ``is_valid`` and logic; None: of any other."""
    if isinstance(node, Column):
        return pc.field(*node.path)
    if isinstance(node, Constant):
        return pc.scalar(node.scalar)
    parts: list[Any] = [compiled(one) for one in node.arguments]
    if node.options or any(part is None for part in parts):
        return None
    if node.name in COMPARISONS:
        return getattr(operator, _OPERATORS[node.name])(*parts)
    if node.name in ("and_kleene", "or_kleene"):
        return joined(operator.and_ if node.name == "and_kleene" else operator.or_, parts)
    if node.name == "is_in":
        return _contained(parts[0], node.values)
    if node.name in ("invert", "is_null", "is_valid"):
        return ~parts[0] if node.name == "invert" else getattr(parts[0], node.name)()
    return None


def joined(join: Callable[[Any, Any], Any], parts: Sequence[Any]) -> Any:
    """``parts``, one at least, joined two by two: a chain of a thousand would be a thousand deep."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return join(joined(join, parts[:half]), joined(join, parts[half:]))


def _contained(part: pc.Expression, values: tuple[Constant, ...]) -> pc.Expression:
    """Whether ``part`` is one of ``values``. Without a value that has a type, ``is_in`` refuses most columns."""
    some = [one.scalar for one in values if one.scalar.is_valid]
    if not some:
        return part.is_null() if values else pc.scalar(False)
    kind = some[0].type
    return part.isin(pa.array([one.scalar if one.scalar.is_valid else pa.scalar(None, kind) for one in values], kind))


def columns_of(node: Node) -> tuple[str, ...]:
    """The top-level columns that a tree reads, sorted."""
    if isinstance(node, Column):
        return (node.path[0],)
    if isinstance(node, Constant):
        return ()
    return tuple(sorted({name for one in node.arguments for name in columns_of(one)}))


def digest_of(node: Node) -> str:
    """BLAKE2b-128 (hex) over the tree: of the content, whatever the release of pyarrow."""
    return blake2b(b"lakeckpt filter 1" + _packed(node), digest_size=DIGEST_BYTES).hexdigest()


def text_of(node: Node) -> str:
    """The tree as people write it; long lists are shortened."""
    if isinstance(node, Column):
        return ".".join(node.path)
    if isinstance(node, Constant):
        return spelled(node)
    parts = [text_of(one) for one in node.arguments]
    if node.name in COMPARISONS:
        return f"{parts[0]} {COMPARISONS[node.name]} {parts[1]}"
    if node.name in ("and_kleene", "or_kleene"):
        return f" {node.name.partition('_')[0]} ".join(
            f"({part})" if isinstance(one, Call) and one.name in ("and_kleene", "or_kleene") else part
            for one, part in zip(node.arguments, parts, strict=True)
        )
    if node.name == "invert":
        return f"not ({parts[0]})"
    if node.name == "is_in":
        some = ", ".join(spelled(value) for value in node.values[:8])
        more = f", … {len(node.values) - 8} more" if len(node.values) > 8 else ""
        return f"{parts[0]} in [{some}{more}]"
    return f"{node.name}({', '.join([*parts, *(f'{name}={value!r}' for name, value in node.options)])})"


# --- the normal form


def type_of(column: Column, schema: pa.Schema) -> pa.DataType | None:
    """The type of a column, or field of a struct, in ``schema``; None where it is not there."""
    kind: pa.DataType = pa.struct(list(schema))
    for name in column.path:
        place = kind.get_field_index(name) if pa.types.is_struct(kind) else -1
        if place < 0:
            return None
        kind = kind.field(place).type
    return kind


def _fitted(node: Node, schema: pa.Schema) -> Node:
    """``node`` with the constants that are compared with a column in the column's type, where they have one."""
    if not isinstance(node, Call):
        return node
    node = replace(node, arguments=tuple(_fitted(one, schema) for one in node.arguments))
    column = next((one for one in node.arguments if isinstance(one, Column)), None)
    kind = None if column is None else type_of(column, schema)
    if kind is None or not (node.name in COMPARISONS or node.name == "is_in"):
        return node
    if node.name in COMPARISONS:
        arguments = [fitted(one, kind) if isinstance(one, Constant) else one for one in node.arguments]
        return replace(node, arguments=tuple(arguments))
    values = [fitted(one, kind) for one in node.values]
    if any(one.scalar.is_valid and one.scalar.type != kind for one in values):
        return node
    return replace(node, values=_as_set(values))


def _as_set(values: Iterable[Constant]) -> tuple[Constant, ...]:
    found = {one.plain: one for one in values}
    return tuple(found[key] for key in sorted(found, key=repr))


def _normal(node: Node) -> Node:
    """``node``, whose parts are in normal form, in normal form."""
    if not isinstance(node, Call):
        return node
    node = replace(node, arguments=tuple(_normal(one) for one in node.arguments))
    if node.name in ("and_kleene", "or_kleene"):
        return _flattened(node)
    if node.name in FLIPPED:
        return _compared(node)
    if node.name == "invert" and isinstance(node.arguments[0], Call):
        inner = node.arguments[0]
        if inner.name == "invert":
            return inner.arguments[0]
        if inner.name in ("equal", "not_equal"):
            return replace(inner, name="equal" if inner.name == "not_equal" else "not_equal")
    return node


def _flattened(node: Call) -> Node:
    parts: dict[bytes, Node] = {}
    for one in node.arguments:
        inner = one.arguments if isinstance(one, Call) and one.name == node.name else (one,)
        parts.update((_packed(part), part) for part in inner)
    found = tuple(parts[key] for key in sorted(parts))
    return found[0] if len(found) == 1 else replace(node, arguments=found)


def _compared(node: Call) -> Call:
    left, right = node.arguments
    swap = isinstance(left, Constant) and not isinstance(right, Constant)
    if not swap and not isinstance(right, Constant):
        swap = _packed(left) > _packed(right)
    return replace(node, name=FLIPPED[node.name], arguments=(right, left)) if swap else node


def _packed(node: Node) -> bytes:
    return dumps(_plain(node), kind="filter", version=_VERSION)


def _plain(node: Node) -> list[object]:
    if isinstance(node, Column):
        return ["column", list(node.path)]
    if isinstance(node, Constant):
        return ["constant", list(node.plain)]
    values = [list(one.plain) for one in node.values]
    return ["call", node.name, [list(one) for one in node.options], values, [_plain(one) for one in node.arguments]]


# --- from pyarrow


class _Parser:
    """Reads the (key, value) pairs in which pyarrow stores an expression: a walk of it, calls ended by ``end``."""

    def __init__(self, expression: pc.Expression) -> None:
        try:
            stored = expression.__reduce__()[1][0]
        except (pa.ArrowException, NotImplementedError) as error:
            raise ConfigError(
                f"the filter {expression} cannot be stored ({error}): refer to columns by their names"
            ) from error
        reader = pa.ipc.open_file(stored)
        self._constants = reader.get_batch(0) if reader.num_record_batches else None
        self._pairs = list(_metadata(reader.schema))
        self._at = 0
        if len(self._pairs) > _MOST_NODES:
            raise ConfigError(f"the filter has {len(self._pairs):,} parts, more than {_MOST_NODES:,}: use isin([...])")

    def node(self) -> Node:
        key, value = self._next()
        if key == "field_ref":
            return Column(path=(value,))
        if key == "nested_field_ref":
            return Column(path=tuple(self._next()[1] for _ in range(int(value))))
        if key == "literal":
            return constant(self._scalar(value))
        if key != "call":
            raise ConfigError(
                f"this release of pyarrow ({pa.__version__}) stores expressions in a way not known: {key}"
            )
        return self._call(value)

    def _call(self, name: str) -> Call:
        if name not in FUNCTIONS:
            raise ConfigError(
                f"a filter cannot call {name!r}: only functions of one row, whose answer is the same every time, "
                "whatever pyarrow's release (lakeckpt.lake.expressions.FUNCTIONS lists them)"
            )
        arguments: list[Node] = []
        call = Call(name=name, arguments=())
        # Chains of one operator, which pyarrow nests, are one call: their parts are sorted, and nested no more, later.
        chained = ("call", name) if name in ("and_kleene", "or_kleene") else None
        depth = 1
        while depth:
            pair = self._pairs[self._at]
            if pair == ("end", name) or pair == chained:
                depth += 1 if pair == chained else -1
                self._at += 1
            elif pair[0] == "options":
                call = self._with_options(call, self._scalar(self._next()[1]))
            else:
                arguments.append(self.node())
        return replace(call, arguments=tuple(arguments))

    def _with_options(self, call: Call, options: pa.StructScalar) -> Call:
        """The options of a call, told by their values; the values of an ``is_in`` are a set."""
        kind = options.type
        found: dict[str, object] = {}
        for i in range(kind.num_fields):
            name = kind.field(i).name
            if name == "value_set":
                call = replace(call, values=_as_set(constant(value) for value in options[name].values))
            elif name == "to_type":
                found[name] = str(kind.field(i).type)
            elif name != "_type_name":
                found[name] = plain_of(options[name])
        # False and the default are left out, so that an option which a newer pyarrow adds changes no digest.
        return replace(
            call, options=tuple((name, value) for name, value in sorted(found.items()) if value not in _DEFAULTS)
        )

    def _scalar(self, place: str) -> pa.Scalar:
        assert self._constants is not None, "an expression without the constants that it names"
        return self._constants.column(int(place))[0]

    def _next(self) -> tuple[str, str]:
        self._at += 1
        return self._pairs[self._at - 1]


def _metadata(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """The metadata of a schema with every pair, in order: as a dict, pyarrow gives each key once.

    By Arrow's C data interface: the third pointer of an ArrowSchema leads to the number of pairs, then to the length
    and the bytes of each key and value.
    """
    capsule = schema.__arrow_c_schema__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = ctypes.c_void_p.from_address(get(capsule, b"arrow_schema") + 2 * ctypes.sizeof(ctypes.c_void_p)).value
    if not at:
        return

    def number() -> int:
        nonlocal at
        at += 4
        return ctypes.c_int32.from_address(at - 4).value

    def text() -> str:
        nonlocal at
        size = number()
        at += size
        return ctypes.string_at(at - size, size).decode()

    for _ in range(number()):
        yield text(), text()
