"""Dependencies below their bounds are refused at import, by the bounds of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from lakeckpt import versions

ROOT = Path(__file__).parents[1]


def test_the_bounds_are_those_of_pyproject() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.fullmatch(r"(\w+)>=([\d.]+)", one).groups() for one in declared)  # type: ignore[union-attr]
    assert {name: tuple(map(int, lowest.split("."))) for name, lowest in bounds.items()} == versions.LOWEST


def test_the_lowest_versions_that_are_tested_are_those_declared() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "requirements/lowest.txt").read_text().splitlines() if line[0] != "#"
    )
    for name, lowest in versions.LOWEST.items():
        pinned = tuple(int(part) for part in pins[name].split("."))
        if name != "torch":  # no CPU build of the lowest is on PyPI
            assert pinned[: len(lowest)] == lowest and not any(pinned[len(lowest) :])


def test_an_older_dependency_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "20.0.0" if name == "pyarrow" else "9999")
    with pytest.raises(ImportError, match=r"pyarrow 20\.0\.0 is installed, .* pyarrow 21 or newer: run `pip"):
        versions.check_versions()


@pytest.mark.parametrize("found", ["21", "21.0.0", "22.0.0.dev3+local", "unknown", None])
def test_a_sufficient_or_unreadable_version_passes(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found if name == "pyarrow" else "9999")
    versions.check_versions()


def test_a_dependency_without_metadata_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    versions.check_versions()
