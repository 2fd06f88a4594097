"""SIGKILL for trainers and agents of several ranks, wherever they are: all go on from one whole cut, and none is lost.

What ranks agree on as they restore, and agents as they persist, is what these jobs stand on. A rank at another step
than the others or with what is another's own, a commit that was told and is gone, and a cut that all ranks had complete
and that is lost though their memory is there, fail. Where one trainer dies the others are killed, as torchrun does it,
or find that out for themselves; a node may lose its memory, and the job come back on another number of ranks.

The default tests end processes in the midst of copies and updates, ``soak`` at lines of what captures, hands over,
persists, does final saves and restores; with ``LAKECKPT_EVERY_KILL=1`` at every one of them.
"""

from __future__ import annotations

import pytest

from tests.checkpoint.kills.sweeps import EVERY, Sweep, swept


@pytest.mark.parametrize(
    ("kind", "shares"), [("midst", False), ("midst", True), pytest.param("hurried", False, marks=pytest.mark.soak)]
)
def test_killed_in_the_midst_of_copies_and_updates_all_ranks_go_on_from_one_whole_cut(kind: str, shares: bool) -> None:
    swept(Sweep(kind=kind, ranks=2, shares=shares, most=3))


@pytest.mark.parametrize(("ranks", "shares"), [(2, False), (2, True), pytest.param(3, False, marks=pytest.mark.soak)])
@pytest.mark.soak
def test_where_a_rank_dies_a_step_behind_the_others_all_go_on_from_the_newest_step_of_all(
    ranks: int, shares: bool
) -> None:
    swept(Sweep(kind="behind", ranks=ranks, shares=shares, most=5))


@pytest.mark.soak
@pytest.mark.timeout(14400 if EVERY else 300)
@pytest.mark.parametrize(
    ("kind", "ranks", "shares"),
    [
        *((kind, 2, False) for kind in ("capturing", "persisting", "final saves", "restoring")),
        *((kind, 2, True) for kind in ("persisting", "restoring")),
        *((kind, 3, False) for kind in ("persisting", "final saves")),
    ],
)
def test_killed_at_a_line_of_what_captures_persists_or_restores_all_ranks_go_on_from_one_whole_cut(
    kind: str, ranks: int, shares: bool
) -> None:
    swept(Sweep(kind=kind, ranks=ranks, shares=shares, most=4))
