"""This module generates traces of virtual time: the gaps between beats of healthy and hung training jobs.

`jobs` gives 50 jobs, `gaps` the gaps of one job over 24 hours, in order of time. Both are pure: the same seed gives the
same trace on every machine. Nothing sleeps. Made before the limits and rules of the watch that are judged by it.

A gap is the time in which no rank of the job beats, in the phase of the rank that the others wait for. Each says what
made it (`Why`), whether it heals by itself, and whether the rank that holds the others works (uses its processor or
moves bytes) or stands still. Stalls that heal may be longer than 300 s; a hang ends when the collectives' timeout kills
the job, and the job begins again (`attempt`), as it does in practice.

**Ordinary steps are thinned.** A day of steps of 0.1 s has 864,000 of them. One block of steps, about a minute, yields
two: a typical one, and one in which each phase has the longest gap of all the others in the block, drawn from the
distribution of that maximum. Medians and longest gaps are thus as in the whole trace. ``block_s=0`` thins nothing.

Where the figures come from:

- iterations of 0.1 to 60 s: from small vision models to language models with accumulated gradients, the range that
  Megatron-LM's and DeepSpeed's logs in public issues show; evenly spread in the logarithm.
  Jitter: lognormal, 3 to 15 %;
- compilation of 40 s to 10 min: reports of 166 s and 300 s for a first step with `torch.compile`, up to 37 min for one
  graph of an inference engine (left out). Up to three compilations again a day, for new shapes, are shorter;
- evaluation of 20 s to 20 min: reports of collectives' timeouts of 10 min met by an evaluation on rank 0; one of 60 min
  is left out. The first is 1.5 to 4 times as long as later ones, as it reads its data and compiles, up to 40 min;
- saves: an asynchronous save holds training for 0.2 to 30 s; one in 25 meets a busy file system and takes up to 8 times
  as long;
- stalls that heal: Pareto with exponent 0.9 from 1 s, cut at one hour, 4 to 60 a day. FALCON (arXiv 2410.12588) reports
  slow phases of tens of seconds to nearly ten hours on 10,000 GPUs; the heavy tail is theirs, exponent and rate are a
  choice;
- stragglers: one rank is 1.2 to 3 times as slow for 10 min to 2 h (the same report);
- growing tables: one job in five reads a table that a writer extends; it waits 90 s in the mean, 15 min at most;
- hangs: about one job in five has one; it lasts 30 min, the timeout that torch long had for a collective of NCCL;
- suspended machines: one job in ten, 1 min to 4 h, once: the clock jumps for ranks and watcher alike.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

__all__ = ["DAY_S", "Gap", "Job", "Why", "gaps", "jobs"]

DAY_S = 86_400.0
HANG_S = 1_800.0
"""A collective's timeout: after so long a hung job is killed by its own processes."""
LONGEST_STALL_S = 3_600.0

_SHARES = {"data": 0.03, "forward": 0.3, "backward": 0.55, "optimizer": 0.1, "between": 0.02}


class Why(enum.Enum):
    """What made a gap."""

    STEP = "step"
    STRAGGLER = "straggler"
    COLLECTION = "garbage collection"
    COMPILE = "compile"
    EVALUATE = "evaluate"
    SAVE = "save"
    TABLE = "growing table"
    STALL = "stall"
    SUSPEND = "suspended machine"
    HANG = "hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The time between two beats, in seconds of the job's clock since its start."""

    at: float
    phase: str
    length: float
    why: Why
    heals: bool = True
    works: bool = True
    """Whether the rank that the others wait for uses its processor or moves bytes during the gap."""
    holder: int | None = None
    """The rank that the others wait for; None if all ranks do the same."""
    attempt: int = 0

    @property
    def end(self) -> float:
        return self.at + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The habits of one job; all times in seconds, 0 for a rate or an interval means never."""

    seed: str
    ranks: int
    step_s: float
    jitter: float
    compile_s: float
    recompilations: int
    evaluate_every_s: float
    evaluate_s: float
    first_evaluation: float
    """How many times longer than the later ones the first evaluation is."""
    names_evaluation: bool
    """Whether the script gives its evaluation a phase of its own; else it lies between two steps."""
    evaluates_on: int | None
    save_every_s: float
    save_s: float
    stalls_a_day: float
    waits_for_table_a_day: float
    stragglers_a_day: int
    suspended_s: float
    hangs_at: float
    """Seconds after the start; 0 for a job that does not hang."""


def jobs(count: int = 50, *, seed: int = 0) -> list[Job]:
    """Give `count` jobs, the same for the same seed."""
    return [_job(f"{seed}/{number}") for number in range(count)]


def _spread(draw: random.Random, low: float, high: float) -> float:
    """Draw evenly in the logarithm."""
    return float(low * (high / low) ** draw.random())


def _job(seed: str) -> Job:
    draw = random.Random(seed)
    return Job(
        seed=seed,
        ranks=2 ** draw.randrange(1, 11),
        step_s=_spread(draw, 0.1, 60.0),
        jitter=draw.uniform(0.03, 0.15),
        compile_s=_spread(draw, 40.0, 600.0),
        recompilations=draw.randrange(4),
        evaluate_every_s=_spread(draw, 1_200.0, 21_600.0),
        evaluate_s=_spread(draw, 20.0, 1_200.0),
        first_evaluation=draw.uniform(1.5, 4.0),
        names_evaluation=draw.random() < 0.3,
        evaluates_on=draw.choice([0, 0, None]),
        save_every_s=_spread(draw, 600.0, 3_600.0),
        save_s=_spread(draw, 0.2, 30.0),
        stalls_a_day=_spread(draw, 4.0, 60.0),
        waits_for_table_a_day=draw.choice([0.0, 0.0, 0.0, 0.0, 40.0]),
        stragglers_a_day=draw.randrange(3),
        suspended_s=_spread(draw, 60.0, 14_400.0) if draw.random() < 0.1 else 0.0,
        hangs_at=draw.uniform(3_600.0, DAY_S - 7_200.0) if draw.random() < 0.2 else 0.0,
    )


def gaps(job: Job, *, seconds: float = DAY_S, block_s: float = 60.0) -> Iterator[Gap]:
    """Give the gaps of `job` in order of time, over `seconds` at least; they follow each other without overlap.

    Args:
        job: one of `jobs`.
        seconds: how long the trace is; the last gap may end later.
        block_s: how many seconds of ordinary steps are thinned to two steps; 0 gives every step.
    """
    draw = random.Random(f"{job.seed}/gaps")
    slow = _slow_spans(job, draw, seconds)
    now, attempt, evaluations = 0.0, 0, 0
    for at, why in [*_plan(job, draw, seconds), (seconds, None)]:
        while now < at:
            steps = max(1, round(min(block_s, at - now) / job.step_s))
            block = _block(job, draw, now, steps, attempt, _slowness(slow, now))
            yield from (gap for gap in block if gap.at < seconds)
            now = max(now + steps * job.step_s, block[-1].end)
        if why is None or now >= seconds:
            return
        for gap in _event(job, draw, why, now, attempt, evaluations):
            yield gap
            now = gap.end
        attempt += why is Why.HANG
        evaluations += why is Why.EVALUATE


def _plan(job: Job, draw: random.Random, seconds: float) -> list[tuple[float, Why]]:
    """When what happens, in order of time."""
    plan = [(0.0, Why.COMPILE)]
    plan += [(draw.uniform(0, seconds), Why.COMPILE) for _ in range(job.recompilations)]
    for every, why in ((job.evaluate_every_s, Why.EVALUATE), (job.save_every_s, Why.SAVE)):
        plan += [(every * number, why) for number in range(1, int(seconds / every) + 1)]
    for a_day, why in ((job.stalls_a_day, Why.STALL), (job.waits_for_table_a_day, Why.TABLE)):
        at = draw.expovariate(a_day / DAY_S) if a_day else seconds
        while at < seconds:
            plan.append((at, why))
            at += draw.expovariate(a_day / DAY_S)
    if job.suspended_s:
        plan.append((draw.uniform(0, seconds), Why.SUSPEND))
    if job.hangs_at:
        plan.append((job.hangs_at, Why.HANG))
    return sorted((event for event in plan if event[0] < seconds), key=lambda event: event[0])


@dataclass(frozen=True, slots=True)
class _Slow:
    """From when to when one rank is slow, and how many times as slow as the others."""

    begins: float
    ends: float
    rank: int
    times: float


def _slow_spans(job: Job, draw: random.Random, seconds: float) -> list[_Slow]:
    spans = []
    for _ in range(job.stragglers_a_day):
        begins = draw.uniform(0, seconds)
        ends = begins + _spread(draw, 600.0, 7_200.0)
        spans.append(_Slow(begins, ends, draw.randrange(job.ranks), draw.uniform(1.2, 3.0)))
    return spans


def _slowness(spans: list[_Slow], now: float) -> _Slow | None:
    return next((span for span in spans if span.begins <= now < span.ends), None)


def _block(job: Job, draw: random.Random, now: float, steps: int, attempt: int, slow: _Slow | None) -> list[Gap]:
    """Stand for `steps` ordinary steps from `now` on: by a typical one and by the longest gap of each phase."""
    found: list[Gap] = []
    for others in (1, steps - 1)[: min(steps, 2)]:
        for phase, share in _SHARES.items():
            length = share * job.step_s * _longest_of(others, job.jitter, draw)
            why, holder = Why.STEP, None
            if slow is not None and phase in ("forward", "backward"):
                length, why, holder = length * slow.times, Why.STRAGGLER, slow.rank
            found.append(Gap(at=now, phase=phase, length=length, why=why, holder=holder, attempt=attempt))
            now += length
    if draw.random() < steps / 500:
        length, holder = draw.uniform(0.2, 2.0), draw.randrange(job.ranks)
        found.append(
            Gap(at=now, phase="between", length=length, why=Why.COLLECTION, holder=holder, attempt=attempt),
        )
    return found


def _longest_of(number: int, jitter: float, draw: random.Random) -> float:
    """Draw the longest of `number` lognormal gaps of median 1: the power of a uniform number is its place."""
    place = max(draw.random(), 1e-300) ** (1 / number)
    return float(math.exp(jitter * NormalDist().inv_cdf(min(place, 1 - 1e-15))))


def _event(job: Job, draw: random.Random, why: Why, now: float, attempt: int, evaluations: int) -> Iterator[Gap]:
    """Give the gap that `why` makes at `now`; after a hang also the compilation of the next attempt."""
    heals, works, holder = True, True, None
    if why is Why.COMPILE:
        phase = "forward"
        length = job.compile_s * (draw.uniform(0.1, 0.5) if now > 0 else 1.0)
    elif why is Why.EVALUATE:
        phase, holder = "evaluate" if job.names_evaluation else "between", job.evaluates_on
        times = draw.lognormvariate(0, 0.15) * (1.0 if evaluations else job.first_evaluation)
        length = min(2_400.0, job.evaluate_s * times)
    elif why is Why.SAVE:
        phase, works = "save", draw.random() < 0.7
        length = job.save_s * draw.lognormvariate(0, 0.3) * (draw.uniform(2, 8) if draw.random() < 0.04 else 1.0)
    elif why is Why.TABLE:
        phase, works = "data", False
        length = min(900.0, draw.expovariate(1 / 90))
    elif why is Why.STALL:
        phase, holder = draw.choices(["data", "backward", "save", "forward"], [60, 25, 10, 5])[0], _any(job, draw)
        length, works = min(LONGEST_STALL_S, draw.paretovariate(0.9)), draw.random() < 0.15
    elif why is Why.SUSPEND:
        phase, length, works = "backward", job.suspended_s, False
    else:
        phase, holder = draw.choice(["data", "forward", "backward"]), _any(job, draw)
        length, heals, works = HANG_S, False, draw.random() < 0.3
    gap = Gap(at=now, phase=phase, length=length, why=why, heals=heals, works=works, holder=holder, attempt=attempt)
    yield gap
    if not heals:
        length = job.compile_s * draw.uniform(0.5, 1.0)
        yield Gap(at=gap.end, phase="forward", length=length, why=Why.COMPILE, attempt=attempt + 1)


def _any(job: Job, draw: random.Random) -> int:
    return draw.randrange(job.ranks)
