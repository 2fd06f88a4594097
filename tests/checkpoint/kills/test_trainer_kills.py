"""SIGKILL for a trainer, its agent, or both, wherever they are: what is found is a complete older or newer cut.

A mixture of two steps, a commit that was told and is gone, or a captured cut that is lost though its memory is there,
fails. The default tests end processes in the midst of copies and updates, ``soak`` at lines of what captures, hands
over, persists and restores; with ``LAKECKPT_EVERY_KILL=1`` at every one of them: 2,700 points, which take 40 minutes.
"""

from __future__ import annotations

import pytest

from tests.checkpoint.kills.sweeps import EVERY, Sweep, swept


@pytest.mark.parametrize("device", [False, True])
def test_killed_in_the_midst_of_copies_and_updates_a_job_goes_on_from_a_whole_cut(device: bool) -> None:
    swept(Sweep(kind="midst", device=device, most=4))


@pytest.mark.soak
@pytest.mark.timeout(14000 if EVERY else 300)
@pytest.mark.parametrize(
    ("kind", "device"),
    [("capturing", False), ("capturing", True), ("persisting", False), ("final saves", False), ("restoring", False)],
)
def test_killed_at_a_line_of_what_captures_persists_or_restores_a_job_goes_on_from_a_whole_cut(
    kind: str, device: bool
) -> None:
    swept(Sweep(kind=kind, device=device, most=9))
