"""The page of a run, in a real browser: it is drawn, and shows what it should."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import lakeckpt
from lakeckpt.cli.main import main
from tests.patience import PATIENCE_S

CHROMIUM = [
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1120,1900"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of three attempts, the second of which is rolled back in part."""
    folder = tmp_path_factory.mktemp("explore")
    (folder / "lake").mkdir()
    pq.write_table(pa.table({"id": list(range(2000))}), folder / "lake" / "part-0.parquet", row_group_size=100)
    for batch_size, steps in ((20, 20), (40, 12), (50, 20)):
        dataset = lakeckpt.LakeDataset(folder / "lake", batch_size=batch_size, shuffle=True, seed=1)
        loader = lakeckpt.LakeLoader(dataset)
        state = {"model": torch.nn.Linear(1, 1), "reader": loader}
        manager = lakeckpt.CheckpointManager(folder / "run", state, persist_every=4, keep=9)
        manager.restore()
        for _, batch in zip(range(steps), (batch for _ in range(9) for batch in loader), strict=False):
            manager.step(batch, metric=1.0)
        manager.close()
        if batch_size == 40:
            assert main(["rollback", str(folder / "run"), "--step", "28"]) == 0
    assert main(["explore", str(folder / "run"), "-o", str(folder / "run.html")]) == 0
    return folder / "run.html"


def browser(page: Path, *options: str, at: str = "") -> str:
    """Open the page and return its elements, as they are when its script has run."""
    command = [*CHROMIUM, f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri() + at]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stdout


def test_the_page_is_drawn(page: Path) -> None:
    elements = browser(page, "--dump-dom")
    assert 'data-ready="yes"' in elements  # the script came to its end
    assert "<b>PROVED</b>" in elements and "<b>48</b><span>optimizer steps" in elements
    assert len(re.findall(r"<circle [^>]*fill=\"var\(--paper\)\"", elements)) == 1  # step 32, which was rolled back
    assert len(re.findall(r"<circle ", elements)) == 13
    assert "rolled back to step 28" in elements
    assert elements.count("attempt 0</span>") == 1
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg", "", elements)  # nothing is loaded from elsewhere


def test_a_step_is_named_in_the_address(page: Path) -> None:
    elements = browser(page, "--dump-dom", at="#step=3")
    assert "20 rows of epoch 0, attempt 0, 1 ranks" in elements


def test_the_picture_has_the_colors_of_three_attempts(page: Path) -> None:
    from matplotlib.image import imread

    picture = page.parent / "page.png"
    browser(page, f"--screenshot={picture}")
    pixels = (imread(picture)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    for color in ((0x3B, 0x7D, 0xD8), (0xE0, 0x7B, 0x39), (0x2F, 0x9E, 0x77)):
        assert (abs(pixels - color).max(axis=1) <= 2).sum() > 500
