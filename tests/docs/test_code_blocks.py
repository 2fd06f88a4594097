"""Every Python block of README and docs runs, in order, in a folder that holds the table ``events``.

Blocks of a page share their names. ``python no-run`` is compiled only (it needs several processes).
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> list[tuple[str, str, int]]:
    """Return (what stands after ``python``, code, line) of each block of ``page``."""
    text = page.read_text(encoding="utf-8")
    return [(m.group(1).strip(), m.group(2), text.count("\n", 0, m.start()) + 2) for m in BLOCK.finditer(text)]


def make_events(folder: Path) -> None:
    rows = 1_000
    generator = np.random.default_rng(0)
    table = pa.table(
        {
            "user": generator.integers(0, 100, rows),
            "item": generator.integers(0, 1_000, rows),
            "label": generator.integers(0, 2, rows).astype("float32"),
        }
    )
    (folder / "events").mkdir()
    for part in range(2):
        pq.write_table(table.slice(part * 500, 500), folder / "events" / f"{part}.parquet", row_group_size=100)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks_of(p)], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_events(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    for kind, code, line in blocks_of(page):
        assert kind in ("", "no-run"), f"{page}: a block of unknown kind {kind!r}"
        compiled = compile("\n" * (line - 1) + code, str(page), "exec")
        if kind != "no-run":
            exec(compiled, names)


def test_every_page_is_named_by_the_readme_or_another_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    unnamed = [page for page in PAGES if page.name != "README.md" and f"{page.stem}.md" not in text]
    assert not unnamed


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_reference_is_what_the_docstrings_say() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "reference" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    current = module.TARGET.read_text(encoding="utf-8")
    assert current == module.generate(), "run: python docs/reference/generate.py"
    current = (ROOT / "docs" / "reference" / "faults.md").read_text("utf-8")
    assert current == module.faults(), "run: python docs/reference/generate.py"
