"""The page of frameworks says which versions were tested, and other versions are refused only for a reason."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.errors import ConfigError, UntestedVersionWarning
from lakeckpt.integrations.common import Framework

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "frameworks.md").read_text("utf-8")
PINS = dict(
    line.split("==")
    for line in (ROOT / "requirements" / "frameworks.txt").read_text("utf-8").splitlines()
    if "==" in line
)


def named() -> dict[str, Framework]:
    """Distribution → its versions, as the integrations name them."""
    found = {}
    for path in (ROOT / "src" / "lakeckpt" / "integrations").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Framework":
                one = Framework(**{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
                found[one.distribution] = one
    return found


def test_each_integration_names_the_versions_of_its_framework() -> None:
    modules = {path.stem for path in (ROOT / "src" / "lakeckpt" / "integrations").glob("*.py")} - {"__init__", "common"}
    assert len(named()) >= len(modules) >= 7


@pytest.mark.parametrize("name", sorted(named()))
def test_the_page_has_the_versions(name: str) -> None:
    one = named()[name]
    versions = one.newest if one.oldest == one.newest else f"{one.oldest} to {one.newest}"
    (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and f"{name} {versions}" in line)
    assert one.newest == PINS[name], "the tests run the newest version"
    assert all(f"{first} to {after}" in row for first, after, _ in one.broken), row


FOUND = {
    "old": "2.4.6.post1",
    "oldest": "2.5.6",
    "between": "2.6.0rc1",
    "fix": "2.6.9",
    "next": "2.7.0",
    "next10": "2.10.0",
    "broken": "2.6.3",
}


def framework(name: str, monkeypatch: pytest.MonkeyPatch) -> Framework:
    """A framework that is installed in the version of this name."""
    monkeypatch.setattr("lakeckpt.integrations.common.version", FOUND.__getitem__)
    broken = (("2.6.2", "2.6.5", "it loses each third batch"),)
    return Framework(distribution=name, oldest="2.5.6", newest="2.6.6", broken=broken)


@pytest.mark.parametrize("name", ["oldest", "between", "fix"])
def test_a_version_that_was_tested_is_taken_without_a_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(), framework(name, monkeypatch).imports():
        warnings.simplefilter("error")


@pytest.mark.parametrize("name", ["old", "next", "next10"])
def test_a_version_that_was_not_tested_warns_and_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = rf"tested with {name} 2\.5\.6 to 2\.6\.6, and {re.escape(FOUND[name])} is installed"
    with pytest.warns(UntestedVersionWarning, match=words), framework(name, monkeypatch).imports():
        pass


def test_a_version_that_is_known_to_break_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"broken 2\.6\.3 does not work: it loses each third batch\. pip install 'broken>=2\.5\.6,<=2\.6\.6'"
    with pytest.raises(ConfigError, match=words), framework("broken", monkeypatch).imports():
        pass


def test_a_framework_that_is_not_installed_is_named() -> None:
    one = Framework(distribution="no-such-thing", oldest="1", newest="2")
    with pytest.raises(ConfigError, match="no-such-thing is not installed: pip install 'no-such-thing>=1,<=2'"):
        with one.imports():
            pass


class _Loop:
    counters: Any = None

    def __init__(self) -> None:
        self.last = True

    @property
    def place(self) -> None:
        raise AssertionError("a property is not run")

    def load(self, state: Any, *, strict: bool = True) -> None: ...

    def save(self, **options: Any) -> None: ...


class _Trainer:
    def __init__(self) -> None:
        self.loop, self.none = _Loop(), None


def test_what_a_framework_lacks_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    one = framework("oldest", monkeypatch)
    one.check(_Trainer(), "loop.counters", "loop.last", "loop.place", "loop.load(state, strict)", "loop.save(prefix)")
    one.check(_Loop, "load()", "counters")
    for owner, seam in (
        (_Trainer(), "loop.first"),
        (_Trainer(), "loops.last"),
        (_Trainer(), "none.last"),
        (_Trainer(), "loop.load(state, prefix)"),
        (_Trainer(), "loop.last()"),
        (_Loop, "reset()"),
    ):
        kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        words = rf"^oldest 2\.5\.6 lacks what lakeckpt.integrations uses: {kind} has no {re.escape(seam)}\. pip install"
        with pytest.raises(ConfigError, match=words):
            one.check(owner, "loop" if isinstance(owner, _Trainer) else "load()", seam)
    with pytest.raises(ConfigError, match=r"oldest 2\.5\.6 lacks .*: cannot import name 'Loops' from 'json'"):
        with one.imports():
            from json import Loops  # type: ignore[attr-defined]  # noqa: F401
