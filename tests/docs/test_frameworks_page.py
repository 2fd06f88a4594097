"""The page of frameworks says which versions work, and which of them the tests run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lakeckpt.errors import ConfigError
from lakeckpt.integrations.common import require

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "frameworks.md").read_text("utf-8")
PINS = dict(
    line.split("==")
    for line in (ROOT / "requirements" / "frameworks.txt").read_text("utf-8").splitlines()
    if "==" in line
)


def required() -> dict[str, tuple[str, str]]:
    """Distribution → the versions that the integrations work with: at least, below."""
    found = {}
    for path in (ROOT / "src" / "lakeckpt" / "integrations").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "require":
                name, at_least, below = (ast.literal_eval(one) for one in call.args)
                found[name] = (at_least, below)
    return found


def test_each_integration_checks_the_version_of_its_framework() -> None:
    modules = {path.stem for path in (ROOT / "src" / "lakeckpt" / "integrations").glob("*.py")} - {"__init__", "common"}
    assert len(required()) >= len(modules) >= 7


@pytest.mark.parametrize("name", sorted(required()))
def test_the_page_has_the_versions(name: str) -> None:
    at_least, below = required()[name]
    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"{name} {at_least}" in line)
    assert f"{name} {at_least} to {below}" in row and f" {PINS[name]} " in row, row


def test_another_version_is_refused_by_an_error_that_names_those_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"one": "2.6.5.post1", "two": "2.10.0rc1"}

    def version(name: str) -> str:
        return versions[name]

    monkeypatch.setattr("lakeckpt.integrations.common.version", version)
    assert require("one", "2.6", "2.7") == "2.6.5.post1" and require("two", "2.9", "3") == "2.10.0rc1"
    with pytest.raises(
        ConfigError, match=re.escape("works with two>=2.6,<2.7, and 2.10.0rc1 is installed: pip install")
    ):
        require("two", "2.6", "2.7")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="works with no-such-thing>=1,<2, and none is installed"):
        require("no-such-thing", "1", "2")
