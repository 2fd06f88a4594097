"""This module prepares the job that the tests of clusters run, and counts what its steps used.

The job trains `tests/system/cluster_train.py` in a folder of its own, over a table that it writes there.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.lake.storage.local import LocalStorage
from tests.frameworks.harness import ROOT, Job, write_table
from tests.patience import PATIENCE_S
from tests.system.cluster_train import EPOCH, EPOCHS

ROWS = 160


class ClusterJob(Job):
    """A job in ``folder``, which is made, over a table of ``rows`` rows. Whoever starts it gives it `environment`."""

    def __init__(self, folder: Path, rows: int = ROWS) -> None:
        super().__init__(folder, folder / "train.py")
        self._rows = rows
        write_table(folder / "table", rows=rows)
        shutil.copy(Path(__file__).with_name("cluster_train.py"), self.script)
        self.environment = {
            **os.environ,
            "NOTES": str(self.notes),
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"]),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "PYTHONWARNINGS": "ignore",
        }

    def wait_for_steps(self, steps: int, *, after: int = 0) -> None:
        """Wait until ``steps`` optimizer steps are noted by attempts later than the first ``after`` that noted some."""

        def noted() -> int:
            lines = self.lines()
            seen = sorted({line["attempt"] for line in lines})[after:]
            return len({line["step"] for line in lines if line["attempt"] in seen})

        wait(lambda: noted() >= steps, self.text)

    def hurry(self) -> None:
        """Let the job take its steps as fast as it can: the test has no more to do in the middle of it."""
        (self.folder / "hurry").touch()

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint."""
        tip = read_history(LocalStorage(self.folder / "run")).tip
        return None if tip is None else tip.step

    def text(self) -> str:
        """Return the ends of all that the job wrote."""
        return "\n".join(one.read_text()[-4000:] for one in sorted(self.folder.glob("*.log")))

    def check_every_row_counted_once(self, *, attempts: int) -> None:
        """Check that each row of each epoch counts once in the surviving history, and that the audit says so."""
        expected = [row + EPOCH * epoch for epoch in range(EPOCHS) for row in range(self._rows)]
        assert self.counts() == Counter(expected), self.text()
        assert len({line["attempt"] for line in self.lines()}) == attempts, self.text()
        assert audit(LocalStorage(self.folder / "run")).verdict == "proved"


def wait(holds: Callable[[], bool], text: Callable[[], str]) -> None:
    """Wait until ``holds()``; where that takes too long, fail with ``text()``."""
    end = time.monotonic() + PATIENCE_S / 2
    while not holds():
        assert time.monotonic() < end, text()
        time.sleep(0.1)


def block_of(page: str, language: str) -> str:
    """Return the one code block of ``language`` in ``docs/how-to/<page>``."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)
