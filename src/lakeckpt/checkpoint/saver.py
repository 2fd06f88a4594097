"""How does a training loop save a cut and wait for it?  Capture and stage on its own thread, then publish.

capture → stage → publish. All ranks call `Saver.save` for the same cut, and talk over their process group. Nothing
changes while a save runs, so that tensors in host memory are written from where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakeckpt.checkpoint.capture import capture, stage
from lakeckpt.checkpoint.cuts import Journal, ReaderTrack
from lakeckpt.checkpoint.indexes import documents_of
from lakeckpt.checkpoint.keep import checked_metric
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.checkpoint.parts import SaveId
from lakeckpt.checkpoint.publish import Publisher
from lakeckpt.checkpoint.report import Remarks
from lakeckpt.checkpoint.staged import StagedCut
from lakeckpt.tracking.exchange import Exchange

__all__ = ["Saver"]


class Saver:
    """Saves cuts for one attempt. ``objects`` are all but the tracked readers, ``tracks`` those."""

    def __init__(
        self,
        publisher: Publisher,
        exchange: Exchange,
        *,
        objects: Mapping[str, Any],
        tracks: Mapping[str, ReaderTrack],
        journal: Journal,
    ) -> None:
        self._publisher = publisher
        self._exchange = exchange
        self._objects = objects
        self._tracks = tracks
        self._journal = journal

    def save(self, step: int, *, metric: Any = None) -> Manifest:
        """Save the cut after optimizer step ``step``, which is as good as ``metric`` (`held_metric`); collective.
        Returns what was committed.

        Raises what `Publisher.publish` does, `UnsupportedValue` for a state that cannot be written, and `ConfigError`
        for a metric that turns out to be no number.
        """
        attempt = self._publisher.attempt
        save = SaveId(attempt=attempt.number, step=step, number=attempt.saves)
        attempt.saves += 1
        manifest = self._publisher.publish(save, self._taken(step, metric), self._exchange)
        self._journal.committed(manifest.step)
        return manifest

    @property
    def remarks(self) -> Remarks:
        """On the last commit."""
        return self._publisher.remarks

    def _taken(self, step: int, metric: Any) -> StagedCut | Exception:
        try:
            number = checked_metric(metric)
            legs = self._journal.legs(step)
            staged = stage(capture(self._objects))
            documents = self._documents() if self._exchange.rank == 0 else {}
            self._journal.handed_over(legs, step)
        except Exception as error:
            return error
        return StagedCut(step=step, staged=staged, readers=legs, metric=number, documents=documents)

    def _documents(self) -> dict[str, Any]:
        return {
            path: document.dumps
            for track in self._tracks.values()
            for path, document in documents_of(track.reader).items()
        }
