"""Documents by the types of fields: what is written is read back, and an error names the document and the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from lakeckpt.errors import WireDamaged
from lakeckpt.wire.documents import Count, Positive, as_row, from_plain, from_plain_of, to_plain


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: Count
    y: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    kind: Literal["open", "closed"]
    points: tuple[Point, ...]
    by_number: Mapping[int, tuple[int, str]]
    free: Any = None
    center: Point | None = None
    sides: Positive = 1

    def __post_init__(self) -> None:
        if self.sides > len(self.points) + 1:
            raise ValueError(f"{self.sides} sides of {len(self.points)} points")


SHAPE = Shape(
    name="a", kind="open", points=(Point(x=1), Point(x=2, y=0.5)), by_number={3: (-4, "b")}, free=(1, [2]), sides=2
)


def test_a_document_is_read_back() -> None:
    plain = to_plain(SHAPE)
    assert plain["points"] == [[1, 0.0], [2, 0.5]] and plain["free"] == (1, [2]) and plain["center"] is None
    assert from_plain(Shape, plain, "a shape") == SHAPE
    assert from_plain_of({"shape": Shape}, "is", {"is": "shape", **plain}, "a shape") == SHAPE


def test_a_field_with_a_default_may_be_missing() -> None:
    plain = to_plain(SHAPE)
    del plain["center"], plain["free"]
    assert from_plain(Shape, plain, "a shape").center is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 1}, "a shape, field 'name': it must be of type str, got 1"),
        ({"more": 1}, "a shape, field 'more': this lakeckpt knows no such field"),
        ({"kind": "round"}, "a shape, field 'kind': it must be one of 'open', 'closed', got 'round'"),
        ({"points": [[1, 0.0], [-1, 0.0]]}, "a shape, field 'points[1].x': it must be at least 0"),
        ({"points": [[True, 0.0]]}, "a shape, field 'points[0].x': it must be of type int, got True"),
        ({"points": [[2**63, 0.0]]}, "a shape, field 'points[0].x': it must be at least 0 and fit 63 bits"),
        ({"points": [[1]]}, r"a shape, field 'points[0]': it must be [x, y], got [1]"),
        ({"points": {}}, "a shape, field 'points': it must be of type list"),
        ({"by_number": {3: [1, 2]}}, "a shape, field 'by_number[3][1]': it must be of type str, got 2"),
        ({"by_number": {"3": [1, "a"]}}, "it must be of type int"),
        ({"by_number": {3: [1, "a", 2]}}, "a shape, field 'by_number[3]': it must have 2 entries"),
        ({"center": 1}, "a shape, field 'center': it must be of type list, got 1"),
        ({"sides": 9}, "a shape: 9 sides of 2 points"),
    ],
)
def test_an_error_names_the_document_and_the_field(change: dict[str, object], said: str) -> None:
    with pytest.raises(WireDamaged) as caught:
        from_plain(Shape, to_plain(SHAPE) | change, "a shape")
    assert said in str(caught.value)


def test_a_field_that_is_missing_is_named() -> None:
    plain = to_plain(SHAPE)
    del plain["points"]
    with pytest.raises(WireDamaged, match="a shape, field 'points': it is missing"):
        from_plain(Shape, plain, "a shape")
    with pytest.raises(WireDamaged, match="a dict with the fields name, kind"):
        from_plain(Shape, [], "a shape")
    with pytest.raises(WireDamaged, match="a shape: field 'is' must be one of shape, got None"):
        from_plain_of({"shape": Shape}, "is", plain, "a shape")
