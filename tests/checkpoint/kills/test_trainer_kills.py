"""SIGKILL for a trainer, its agent, or both, wherever they are: what is found is a complete older or newer cut.

A mixture of two steps, a commit that was told and is gone, or a captured cut that is lost though its memory is there,
fails. The default tests end processes in the midst of copies and updates, ``soak`` at lines of what captures, hands
over, persists and restores; with ``LAKECKPT_EVERY_KILL=1`` at every one of them: 2,700 points, which take 40 minutes.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.checkpoint.kills.job import CAPTURING, LAST, PERSISTING, RESTORING, Site, adopt
from tests.checkpoint.kills.points import Doom, Process
from tests.patience import PATIENCE_S
from tests.tracking.processes import run_processes

EVERY = os.environ.get("LAKECKPT_EVERY_KILL") == "1"
SWEEP_S = 7000.0 if EVERY else PATIENCE_S
TRAINER: tuple[Process, ...] = ("trainer",)
AGENT: tuple[Process, ...] = ("agent",)
BOTH: tuple[Process, ...] = ("trainer", "agent")
MODULES: dict[str, tuple[ModuleType, ...]] = {
    "midst": (),
    "capturing": CAPTURING,
    "persisting": PERSISTING,
    "restoring": RESTORING,
}
BETWEEN = Doom(process="trainer", label="after a cut", hit=5, victims=BOTH)


def survive(site: Site, doom: Doom, modules: tuple[ModuleType, ...], *, drains: bool) -> bool:
    """Run a job to ``doom``, look at what is there, and go on to its end; whether it met its doom.

    ``drains``: an agent that was left alone does the last will before the trainer comes back.
    """
    notes = site.notes
    notes["killed"] = 0
    status = site.train(doom, modules=modules)
    if status == 0:  # the agent was killed, or nobody was, or the agent came to its point behind the trainer's end
        assert doom.process == "agent" or "trainer" not in doom.victims or not notes["killed"]
    else:
        assert notes["killed"] and "trainer" in doom.victims, site.failure
        captured, known = site.captured(), max(notes["completed"], notes["committed"])
        if drains and doom.victims == TRAINER:
            site.drain()
            assert site.committed() >= known, f"step {known} was captured, and did not come to storage"
        if captured < notes["completed"]:  # then it had said goodbye, and its agent has persisted all
            site.drain()
            found = site.committed()
            assert found >= notes["completed"], f"step {notes['completed']} was complete in memory: {captured}, {found}"
        assert site.committed() >= notes["committed"], f"the commit of step {notes['committed']} is gone"
        assert site.train() == 0, site.failure
        assert notes["restored"] >= max(known, captured), f"went on from {notes['restored']}, {known} was known"
    site.join()
    assert site.committed() == LAST
    return bool(notes["killed"])


def sweep(rank: int, folder: str, kind: str, device: bool, most: int) -> None:
    """Run a sweep in a process of its own, which adopts the agents; what failed is written down."""
    adopt()
    modules = MODULES[kind]
    process: Process = "agent" if kind == "persisting" else "trainer"
    met = 0
    sites = (Site(Path(folder, str(number)), device=device) for number in itertools.count())
    first = site = next(sites)
    try:
        if kind == "restoring":
            first.train(BETWEEN)
        assert first.train(modules=modules) == 0, first.failure
        first.join()
        chosen = list(dooms(first.met(process), process, kind, most))
        for number, doom in enumerate(chosen):
            site = next(sites)
            try:
                if kind == "restoring":
                    site.train(BETWEEN)
                met += survive(site, doom, modules, drains=number % 4 < 2)
            except AssertionError as error:
                raise AssertionError(f"{doom}: {error}") from error
        assert met >= len(chosen) // 2, f"only {met} of {len(chosen)} came to their points"
    except BaseException:
        Path(folder, "failed").write_text(traceback.format_exc())
        for one in (first, site):
            one.kill()
        raise


def dooms(met: Counter[str], process: Process, kind: str, most: int) -> Iterator[Doom]:
    """At most ``most`` points of those that were met, evenly; of each one meeting, with all victims in turn."""
    lines = sorted(label for label in met if (":" in label) == (kind != "midst"))
    points = [(label, 1 + number * 7919 % met[label]) for number, label in enumerate(lines)]
    if kind == "midst":
        points = [(label, max(1, met[label] * part // 4)) for label in lines for part in (1, 2, 3, 4)]
    stride = 1 if EVERY else max(1, -(-len(points) // most))
    victims = (
        [AGENT, BOTH] if process == "agent" else [TRAINER, BOTH] if kind == "restoring" else [TRAINER, BOTH, AGENT]
    )
    for number, (label, hit) in enumerate(points[stride // 2 :: stride]):
        yield Doom(process=process, label=label, hit=hit, victims=victims[number % len(victims)])


def swept(kind: str, *, device: bool, most: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lakeckpt-kills-") as folder:
        try:
            run_processes(1, sweep, folder, kind, device, most, patience_s=SWEEP_S)
        except AssertionError as error:
            failed = Path(folder, "failed")
            raise AssertionError(failed.read_text() if failed.exists() else str(error)) from error


@pytest.mark.parametrize("device", [False, True])
def test_killed_in_the_midst_of_copies_and_updates_a_job_goes_on_from_a_whole_cut(device: bool) -> None:
    swept("midst", device=device, most=4)


@pytest.mark.soak
@pytest.mark.timeout(7200 if EVERY else 300)
@pytest.mark.parametrize(
    ("kind", "device"), [("capturing", False), ("capturing", True), ("persisting", False), ("restoring", False)]
)
def test_killed_at_a_line_of_what_captures_persists_or_restores_a_job_goes_on_from_a_whole_cut(
    kind: str, device: bool
) -> None:
    swept(kind, device=device, most=9)
