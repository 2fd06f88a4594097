"""No assert in our source has an effect: `python -O` drops asserts, and what they do with them.

The checker reads the source. An assert may call only functions that are known to change nothing, and may not ask for a
property of its module that stores something. The checker cannot see what a property's own calls and properties store,
properties of other modules, and operators that a class defines. `tests/checkpoint/test_without_asserts.py` runs the law
without asserts for the rest.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lakeckpt

SOURCE = Path(lakeckpt.__file__).parent
PURE = {"all", "any", "isinstance", "len", "max", "min", "sorted", "sum", "type"}
ASKED_AGAIN = {"assert self._state is not None"}
"""Asserts that may ask for a property that stores something: the statement that follows asks for it, too."""


def effects(tree: ast.Module) -> Iterator[str]:
    """Every assert of a module that may have an effect, as ``line: what it does``."""
    storing = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _stores(node)}
    for found in ast.walk(tree):
        if not isinstance(found, ast.Assert):
            continue
        for node in ast.walk(found.test):
            wrong = _wrong(node, set() if ast.unparse(found) in ASKED_AGAIN else storing)
            if wrong:
                yield f"{found.lineno}: {wrong}"


def _stores(function: ast.FunctionDef) -> bool:
    """Whether it is a property that binds, changes or deletes what outlives it."""
    kinds = {ast.unparse(one).rpartition(".")[2] for one in function.decorator_list}
    if "cached_property" in kinds:
        return True
    kept = (ast.Attribute, ast.Subscript)
    changed = (node for node in ast.walk(function) if isinstance(node, kept) and not isinstance(node.ctx, ast.Load))
    return "property" in kinds and any(changed)


def _wrong(node: ast.AST, storing: set[str]) -> str:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name not in PURE:
            return f"calls {name}"
    if isinstance(node, ast.Attribute) and node.attr in storing:
        return f"asks for {node.attr}, a property that stores something"
    if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
        return f"has {ast.unparse(node)}"
    return ""


def test_no_assert_in_the_source_has_an_effect() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 100
    found = [
        f"{path.relative_to(SOURCE)}:{line}" for path in paths for line in effects(ast.parse(path.read_text("utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("assert self.settle()", "calls self.settle"),
        ("assert read(x) == b''", "calls read"),
        ("assert x if len(y) else y.pop()", "calls y.pop"),
        ("assert (x := 1)", "has (x := 1)"),
        ("class A:\n @property\n def p(self):\n  self.q = 1\n def f(self):\n  assert self.p is self.q", "asks for p"),
        ("class A:\n @property\n def p(self):\n  self.q[0] += 1\ndef f(a):\n assert a.p", "asks for p"),
        ("class A:\n @functools.cached_property\n def p(self): ...\ndef f(a):\n assert a.p", "asks for p"),
    ],
)
def test_asserts_with_effects_are_found(source: str, wrong: str) -> None:
    (found,) = effects(ast.parse(source))
    assert wrong in found


def test_asserts_without_effects_pass() -> None:
    source = """
class A:
    @property
    def p(self):
        found = [1]
        return found
    def f(self):
        assert self.p and isinstance(self, A) and all(one for one in self.p), f"{self.say()} is wrong"
"""
    assert list(effects(ast.parse(source))) == []
