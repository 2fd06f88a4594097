"""Which epoch do the workers of a plain torch DataLoader read?  They agree through a small file.

A torch DataLoader hands every worker process its own copy of the dataset and never tells the main process's copy that
an iteration began, so an epoch counted in either would be lost. The workers of one iteration agree on its epoch through
a file that belongs to the main process: the first worker of an iteration moves it on, the others join. An iteration is
told by torch's base seed, by how often the worker process has begun one, and by which workers have: a worker that
begins again begins another iteration. Workers that live on from one iteration to the next have an old copy of the
dataset, so where the main process goes to another place, the file says where.

The file is made with the dataset, locked with flock while it is read and written, and removed with the dataset.
`lakeckpt.LakeLoader` plans in the main process and needs none of this.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lakeckpt.core.state import ReaderState
from lakeckpt.data.shared_file import SharedFile

__all__ = ["EpochFile", "Turn"]

_TURNS_KEPT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An iteration, as a worker joins it."""

    epoch: int
    is_first: bool
    """Whether it is the first since the main process went to another place (or since the dataset was made)."""
    start: Mapping[str, Any] | None
    """Where the main process went: ``{"epoch": …, "state": …}``; None: nowhere, or the iteration is not the first."""


class EpochFile(SharedFile):
    """The file; picklable by its path. A copy within one process (of a dataset that was copied) has one of its own."""

    prefix = "epoch"

    def epoch(self, rank: int) -> int | None:
        """The epoch that workers of ``rank`` read last; None where none has begun since the last `go_to`."""
        with self._locked() as known:
            turns = known.get(str(rank), {}).get("turns")
        return int(turns[-1]["epoch"]) if turns else None

    def go_to(self, rank: int, epoch: int, state: Mapping[str, Any] | None) -> None:
        """Let the next iteration of ``rank``'s workers begin at ``state`` (None: at the start of ``epoch``)."""
        with self._locked() as known:
            known[str(rank)] = {"turns": [], "start": {"epoch": epoch, "state": state}}

    def join(
        self,
        rank: int,
        worker: int,
        *,
        base_seed: int,
        begun: int,
        first: int,
        loaded: ReaderState | None,
        world_size: int,
    ) -> Turn:
        """Note that ``worker`` of ``rank`` begins an iteration, and return which.

        ``begun``: how many iterations its process has begun before. ``first`` is the epoch of the first iteration;
        ``loaded`` a state given to the worker itself.
        """
        with self._locked() as known:
            mine = known.setdefault(str(rank), {"turns": []})
            turns = mine["turns"]
            # Any of the last ones: of an iteration that was broken off early, a worker may begin late.
            key = [base_seed, begun]
            turn = next((one for one in reversed(turns) if one["key"] == key and worker not in one["workers"]), None)
            if turn is None:
                last = turns[-1] if turns else {"epoch": mine.get("start", {}).get("epoch", first) - 1, "number": -1}
                turn = {"epoch": last["epoch"] + 1, "number": last["number"] + 1, "key": key, "workers": []}
                turns.append(turn)
                del turns[:-_TURNS_KEPT]
            if loaded is not None:
                turn["epoch"] = loaded.epoch
                if loaded.segment.world_size == world_size:  # else an end, of other ranks
                    mine["lanes"] = loaded.segment.num_lanes
            turn["workers"].append(worker)
            start = mine.get("start") if turn["number"] == 0 else None
            return Turn(epoch=turn["epoch"], is_first=turn["number"] == 0, start=start)

    def agree_lanes(self, rank: int, proposed: int) -> int:
        """Return the number of lanes that ``rank`` reads, which is ``proposed`` where nobody has said another before.

        Whoever needs it first decides: the workers' first iteration, or ``len`` in the main process (where there is one
        rank, or the number is known), which does not know how many workers will be, and whose answer must stay true.
        """
        with self._locked() as known:
            return int(known.setdefault(str(rank), {"turns": []}).setdefault("lanes", proposed))

    def has_lanes(self, rank: int) -> bool:
        """Whether the number of lanes that ``rank`` reads was agreed on."""
        with self._locked() as known:
            return "lanes" in known.get(str(rank), {})

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        with self.opened() as file:
            raw = file.read()
            known: dict[str, Any] = json.loads(raw) if raw else {}
            yield known
            file.seek(0)
            file.truncate()
            file.write(json.dumps(known).encode())
