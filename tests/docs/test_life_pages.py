"""The pages that follow a batch and a checkpoint through the source name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "explanation").glob("life-of-*.md"))
MOST_LINES = 90


def test_there_is_a_page_for_a_batch_and_one_for_a_checkpoint() -> None:
    assert [page.stem for page in PAGES] == ["life-of-a-batch", "life-of-a-checkpoint"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text)) - {"__init__.py"}
    assert len(named) > 30
    missing = sorted(name for name in named if not (ROOT / "src" / "lakeckpt" / name).is_file())
    assert not missing, f"{page.name} names files that are not there: {missing}"
    assert len(text.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_readme_links_the_page(page: Path) -> None:
    assert f"docs/explanation/{page.name}" in (ROOT / "README.md").read_text("utf-8")
