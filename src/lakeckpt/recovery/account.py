"""This module keeps the account of a run: how much of its time was training, and what each fault cost.

    invalid time = Σ faults x (perception + scheduling + initialization + recompute) + time blocked by saving + stalls

The effective training time is the rest. The module is pure: it reads the faults in the log of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lakeckpt.recovery.faults import Fault

__all__ = ["Account", "account_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where the time of a run went, in seconds."""

    elapsed_s: float
    """From the beginning of the first attempt to the newest entry of the log."""
    faults: int
    perception_s: float = 0.0
    """From faults to the launcher that noticed them."""
    scheduling_s: float = 0.0
    """From there to new processes; of a job that was started by hand, the time until a person did it, too."""
    initialization_s: float = 0.0
    """Imports, meeting, building the model, restoring, and the first step."""
    recompute_s: float = 0.0
    """Steps that were done again."""
    saving_s: float = 0.0
    """For how long saves have held up the training threads of attempts that ended by a fault."""
    stalled_s: float = 0.0
    """Stalls that ended by themselves: all ranks stood still. The wait before a stall is acted on is perception."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """Cause → how many faults; the causes are those of explicit faults, as far as the table knows them."""

    @property
    def invalid_s(self) -> float:
        """Time that trained nothing that lasts."""
        faults = self.perception_s + self.scheduling_s + self.initialization_s + self.recompute_s
        return min(self.elapsed_s, faults + self.saving_s + self.stalled_s)

    @property
    def effective(self) -> float:
        """The effective training time, as a share of all; 1.0 if no time has passed."""
        return 1.0 - self.invalid_s / self.elapsed_s if self.elapsed_s > 0 else 1.0

    def to_plain(self) -> dict[str, Any]:
        """Return JSON-able values."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**plain, "invalid_s": self.invalid_s, "effective": self.effective}


def account_of(faults: Sequence[Fault], *, elapsed_s: float, stalled_s: float = 0.0) -> Account:
    """Return the account of a run whose attempts ended by ``faults``, and which lasts since ``elapsed_s``; all its
    ranks stood still for ``stalled_s`` of that, and went on by themselves."""
    initial = ("imports", "group", "decided", "restored", "first step")
    return Account(
        elapsed_s=elapsed_s,
        faults=len(faults),
        perception_s=sum(one.phases.get("perceived", 0.0) for one in faults),
        scheduling_s=sum(one.phases.get("processes", 0.0) for one in faults),
        initialization_s=sum(one.phases.get(name, 0.0) for one in faults for name in initial),
        recompute_s=sum(one.steps_again * one.first.step_s for one in faults),
        saving_s=sum(one.first.stalled_s for one in faults),
        stalled_s=stalled_s,
        causes=dict(Counter(one.first.because for one in faults).most_common()),
    )
