"""This module judges which ranks hold up a job that stands still, and why.

`judge` compares two looks at all ranks, a second apart. Its rules come in this order, and the first one that fits wins:

1. Ranks have ended: the first of them is to blame, or those that have left before the others.
2. Ranks are stopped by a signal; a debugger, or a job that is stopped as a whole, is a pause, and nobody is blamed.
3. Ranks are out of step: they have taken a micro-batch more or less than the others (`out_of_step`).
4. The collectives that each rank has entered, as the flight recorder has them, say who waits for whom. Ranks that
   lack a collective hold up the others; ranks in another one than most do not match.
5. Without a recorder, ranks that do something else than most: by phase and stack. Ranks that wait in a collective
   are never among them.
6. If all are in the same collective, the network or its library is at fault, and no rank is blamed.

If all ranks wait for data, save or restore, that may take as long as it takes, and counts as work.

The reason of a rank to stand still comes from its process: a dead child, a disk, a socket, a lock, a loop. A rank whose
page moved between the looks is never blamed: then nothing stands still, and there is no verdict. The module is pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lakeckpt.watch.beat import COMPUTES
from lakeckpt.watch.looks import Collective, Frame, RankLook, ThreadLook
from lakeckpt.wire.documents import Count

__all__ = ["Certainty", "Kind", "StallVerdict", "judge", "out_of_step"]

Kind = Literal[
    "dead", "stopped", "out of step", "lock", "gil", "loop", "socket", "disk", "file", "pipe", "child", "worker",
    "sleep", "mismatch", "cycle", "network", "unknown",
]  # fmt: skip
Certainty = Literal["certain", "still", "works", "paused"]
"""It cannot heal; the culprits do nothing; they do something; or it was meant."""
_STEPS_APART = 3
_INNERMOST = 3
_WAITS_IN = ("torch/distributed/", "torch/autograd/graph.py", "torch/nn/parallel/distributed.py")
_LOOP_TICKS = 20
"""Of a hundred ticks of a second: a thread that uses so many is busy."""
_SWITCHES, _BYTES = 10, 1 << 16
"""A process that does nothing has fewer switches and moves less between two looks: the looks themselves cost some."""
_CLOSING = "closing"
_TIMED = frozenset(("start", "restore", "data", "save", "closing"))
"""Phases in which all ranks may be at once for as long as it takes: a growing table is waited for, and saves and
restores have time limits of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallVerdict:
    """Which ``ranks`` hold up the others, of which ``kind`` the fault is, and the ``reason`` in a sentence."""

    ranks: tuple[Count, ...]
    kind: Kind
    reason: str
    certainty: Certainty


def judge(
    first: Mapping[int, RankLook], second: Mapping[int, RankLook], *, world: int, here: Collection[int] = ()
) -> StallVerdict | None:
    """Return the verdict on two looks at the ranks of a job, rank → look; None if a rank that lives moved between them.

    ``here``: ranks of the nodes that have looked. If one of them is not among the looks, it has left.
    """
    living = [rank for rank, look in second.items() if not look.ended]
    if any(rank in first and first[rank].beats != second[rank].beats for rank in living):
        return None
    if left := tuple(sorted(set(here) - second.keys())):
        text = f"rank {_named(left)} has ended its training, the others wait"
        return StallVerdict(ranks=left, kind="out of step", reason=text, certainty="certain")
    for rule in (_ended, _paused_or_stopped, _closing, out_of_step):
        if (verdict := rule(second)) is not None:
            return verdict
    if missing := tuple(sorted(set(range(world)) - second.keys())):
        text = f"the node of rank {_named(missing)} says nothing of its ranks, all others wait"
        return StallVerdict(ranks=missing, kind="network", reason=text, certainty="still")
    phases = {look.phase for look in second.values()}
    if len(phases) == 1 and phases <= _TIMED:
        every = _explained(tuple(sorted(second)), f"all ranks are in {phases.pop()}", first, second)
        return replace(every, certainty="works")
    culprits, why, certainty, kind = _by_collectives(second) or _by_minority(second)
    if not culprits:
        everybody = "all ranks wait in the same collective: the network or its library is at fault"
        return StallVerdict(ranks=(), kind="network", reason=why or everybody, certainty=certainty or "still")
    if kind is not None and certainty is not None:
        return StallVerdict(ranks=culprits, kind=kind, reason=why, certainty=certainty)
    found = _explained(culprits, why, first, second)
    return found if certainty is None else replace(found, certainty=certainty)


def out_of_step(looks: Mapping[int, RankLook]) -> StallVerdict | None:
    """Return which ranks have taken a micro-batch more or less than the others, and stay by it: the difference was not
    there at an earlier step, and was the same at the last three steps that all have finished. None: no rank has.

    Ranks that take other numbers of micro-batches by design, in each step or never, are not out of step.
    """
    taken = {rank: dict(look.taken) for rank, look in looks.items()}
    if len(taken) < 2:
        return None
    steps = sorted(set.intersection(*(set(one) for one in taken.values())))
    if len(steps) <= _STEPS_APART:
        return None
    since = {rank: tuple(one[step] - one[steps[0]] for step in steps) for rank, one in taken.items()}
    most = since[_groups(since)[0][0]]
    apart = {rank: tuple(mine - theirs for mine, theirs in zip(one, most, strict=True)) for rank, one in since.items()}
    culprits = tuple(sorted(rank for rank, one in apart.items() if one[-1] and len(set(one[-_STEPS_APART:])) == 1))
    if not culprits or len({apart[rank][-1] for rank in culprits}) > 1:
        return None
    if 2 * len(culprits) == len(looks):
        culprits = tuple(sorted(looks))  # it cannot be told which half is right
    rank, last = next(rank for rank, one in apart.items() if one[-1]), steps[-1]
    at = next(step for step, one in zip(steps, apart[rank], strict=True) if one)
    text = f"rank {rank} has taken {_times(abs(apart[rank][-1]))} {'more' if apart[rank][-1] > 0 else 'less'} than the "
    text += f"others since step {at} ({taken[rank][last]} in all at step {last})"
    return StallVerdict(ranks=culprits, kind="out of step", reason=text, certainty="certain")


def _times(number: int) -> str:
    return f"{number} micro-batch{'es' if number > 1 else ''}"


def _ended(looks: Mapping[int, RankLook]) -> StallVerdict | None:
    dead = sorted((look for look in looks.values() if look.ended), key=lambda look: (look.ended, look.rank))
    if not dead:
        return None
    one = dead[0]
    how = f": {one.error}" if one.error else " for a reason that is not known"
    text = f"rank {one.rank} was the first to end{how}"
    return StallVerdict(ranks=(one.rank,), kind="dead", reason=text, certainty="certain")


def _paused_or_stopped(looks: Mapping[int, RankLook]) -> StallVerdict | None:
    traced = [rank for rank, look in looks.items() if look.process is not None and look.process.tracer]
    stopped = [rank for rank, look in looks.items() if look.process is not None and look.process.state == "T"]
    if traced:
        text = f"rank {_named(sorted(traced))} is traced by a debugger"
        return StallVerdict(ranks=(), kind="stopped", reason=text, certainty="paused")
    if not stopped:
        return None
    if len(stopped) == len(looks):
        return StallVerdict(ranks=(), kind="stopped", reason="all ranks are stopped by a signal", certainty="paused")
    text = f"rank {_named(sorted(stopped))} is stopped by a signal (SIGSTOP)"
    return StallVerdict(ranks=tuple(sorted(stopped)), kind="stopped", reason=text, certainty="certain")


def _closing(looks: Mapping[int, RankLook]) -> StallVerdict | None:
    ranks = tuple(sorted(rank for rank, look in looks.items() if look.phase == _CLOSING))
    if not ranks or len(ranks) == len(looks):
        return None
    text = f"rank {_named(ranks)} has left its loop after step {looks[ranks[0]].step}, the others have not"
    return StallVerdict(ranks=ranks, kind="out of step", reason=text, certainty="certain")


_Found = tuple[tuple[int, ...], str, Certainty | None, Kind | None]
"""The culprits, and why they are; and the certainty and kind if the rule itself says them."""


def _by_collectives(looks: Mapping[int, RankLook]) -> _Found | None:
    """Follow who waits for whom, by the collectives that ranks have entered. None: no recorder says it."""
    entered: dict[str, dict[int, Collective]] = defaultdict(dict)
    for rank, look in looks.items():
        for one in look.recorded:
            entered[one.group][rank] = one
    if not entered:
        return None
    waits: dict[int, set[int]] = defaultdict(set)
    for its in entered.values():
        furthest = max(one.number for one in its.values())
        members = set(next(iter(its.values())).members or its) & looks.keys()
        there = [rank for rank, one in its.items() if one.number == furthest]
        lack = {rank for rank in members if rank not in its or its[rank].number < furthest}
        pending = any(its[rank].completed < furthest for rank in there)
        if not pending:
            continue
        if not lack:
            if (found := _mismatch({rank: its[rank] for rank in there})) is not None:
                return found
            continue
        for rank in there:
            waits[rank] |= lack
    if not waits:
        return (), "", "still", None
    culprits = sorted({rank for lack in waits.values() for rank in lack} - waits.keys())
    if not culprits:
        return tuple(sorted(waits)), "ranks wait for each other in different groups: a cycle", "certain", "cycle"
    at = next(one for one in (entered[group].get(min(waits)) for group in entered) if one is not None)
    return tuple(culprits), f"the others wait in {at.operation or 'a collective'} no. {at.number}", None, None


def _mismatch(its: Mapping[int, Collective]) -> _Found | None:
    groups = _groups({rank: (one.operation, one.sizes) for rank, one in its.items()})
    if len(groups) == 1:
        return None
    odd, most = its[groups[-1][0]], its[groups[0][0]]
    culprits = tuple(rank for group in groups[1:] for rank in group)
    if len(groups[0]) == len(groups[1]):
        culprits = tuple(sorted((*groups[0], *culprits)))
    text = (
        f"collectives do not match: rank {_named(culprits)} is in {odd.operation} {odd.sizes} no. {odd.number}, the "
        f"others in {most.operation} {most.sizes} no. {most.number}"
    )
    return culprits, text, "certain", "mismatch"


def _by_minority(looks: Mapping[int, RankLook]) -> _Found:
    """Find the ranks that do something else than those that wait in a collective."""
    waiting = {rank for rank, look in looks.items() if _is_waiting(look)}
    if waiting and len(waiting) < len(looks):
        return tuple(sorted(looks.keys() - waiting)), "the others wait in a collective", None, None
    groups = _groups({rank: (look.phase, *_innermost(look)) for rank, look in looks.items()})
    if len(groups) == 1:
        return ((), "", "still", None) if waiting else (tuple(sorted(looks)), "all ranks do the same", "works", None)
    odd = tuple(sorted(rank for group in groups[1:] for rank in group))
    if len(groups[0]) == len(groups[1]):
        odd = tuple(sorted(looks))
        return odd, "the ranks do different things, and it is not clear which of them wait", None, None
    if waiting >= looks.keys():
        text = f"rank {_named(odd)} is in another collective than the others: they do not match. It is at "
        return odd, f"{text}{_line(looks[odd[0]])}, the others at {_line(looks[groups[0][0]])}", "certain", "mismatch"
    return odd, "the others do the same", None, None


def _is_waiting(look: RankLook) -> bool:
    """Return whether a rank waits for others: in a collective, or in the manager at a save or restore."""
    process, main = look.process, look.main
    if process is not None and process.state in ("R", "D", "T"):
        return False
    if main is None or not main.frames:
        return look.phase in COMPUTES and (process is None or process.waits in ("futex", ""))
    return any(part in main.frames[0].file for part in _WAITS_IN) or _is_in_manager(main)


def _is_in_manager(main: ThreadLook) -> bool:
    return any("lakeckpt/tracking/" in frame.file for frame in main.frames[:8])


def _explained(
    culprits: tuple[int, ...], why: str, first: Mapping[int, RankLook], second: Mapping[int, RankLook]
) -> StallVerdict:
    """Say why the first of the ``culprits`` does not come on."""
    look = second[culprits[0]]
    kind, reason, works = _reason(first.get(look.rank), look)
    at = f" at {_line(look)}" if _line(look) else ""
    data = f", while its loader reads {look.reads}" if look.phase == "data" and look.reads else ""
    text = f"rank {_named(culprits)} {reason}{at} in {look.phase or 'an unknown phase'}{data}; {why}"
    text += _evidence(first.get(look.rank), look)
    return StallVerdict(ranks=culprits, kind=kind, reason=text, certainty="works" if works else "still")


def _evidence(before: RankLook | None, look: RankLook) -> str:
    """Return what else is seen of a rank, for people: no rule follows from it."""
    text, process, earlier = "", look.process, None if before is None else before.process
    if process is not None and process.log and earlier is not None:
        grows = process.log_bytes != earlier.log_bytes
        text = f"; its log {process.log} {'grows' if grows else 'does not grow'}"
    return text + (f"; its {look.gpu}" if look.gpu else "")


def _reason(before: RankLook | None, look: RankLook) -> tuple[Kind, str, bool]:
    """Return the kind, what the rank does, and whether it works."""
    process, main = look.process, look.main
    bad = next((one for one in look.children if one.state in ("Z", "T")), None)
    if process is None:
        return "unknown", "is not seen", False
    if process.state == "D":
        return "disk", f"waits for a disk ({process.waits_on})", False
    earlier = None if before is None else before.process
    ticks = 0 if earlier is None else process.ticks - earlier.ticks
    moves = earlier is not None and (
        process.switches > earlier.switches + _SWITCHES or process.moved_bytes > earlier.moved_bytes + _BYTES
    )
    if bad is not None and process.state == "S":
        how = "has ended" if bad.state == "Z" else "is stopped"
        kind: Kind = "worker" if look.phase == "data" or bad.state == "T" else "child"
        return kind, f"waits for its child process {bad.pid} ({bad.name}), which {how}", False
    if process.state == "R" or ticks >= _LOOP_TICKS:
        owner = next((one for one in look.threads if one.owns_gil), None)
        if owner is not None and not owner.is_main and main is not None:
            return "gil", f"waits for the interpreter's lock, which thread {owner.name!r} holds", False
        return "loop", "computes", True
    said: dict[str, tuple[Kind, str]] = {
        "socket": ("socket", f"waits for {process.waits_on or 'a socket'}"),
        "file": ("file", f"waits for {process.waits_on}"),
        "pipe": ("pipe", f"waits for {process.waits_on}"),
        "lock": ("file", f"waits for {process.waits_on}"),
        "sleep": ("sleep", "sleeps"),
        "child": ("child", "waits for a child process"),
        "futex": ("lock", "waits for a lock"),
    }
    kind, text = said.get(process.waits, ("unknown", "stands still"))
    if process.waits == "futex" and look.children and look.phase == "data":
        kind, text = "worker", "waits for its loader's workers"
    return kind, text, moves and process.waits not in ("futex",)


def _line(look: RankLook) -> str:
    """Return the innermost line of the script, or of a library, that the training thread is at."""
    return "" if look.main is None or not look.main.frames else str(_told(look.main.frames))


def _told(frames: Sequence[Frame]) -> Frame:
    """Return the frame that tells most: the innermost one outside of the standard library and of installed packages."""
    own = (one for one in frames if "/lib/python" not in one.file and "site-packages" not in one.file)
    return next((one for one in own if not one.file.startswith("<")), frames[0])


def _innermost(look: RankLook) -> tuple[str, ...]:
    frames: Iterable[Frame] = () if look.main is None else look.main.frames[:_INNERMOST]
    waits = "" if look.process is None else look.process.waits
    return (*(f"{one.function} {one.file}:{one.line}" for one in frames),) or (waits,)


def _groups(keys: Mapping[int, Hashable]) -> list[tuple[int, ...]]:
    """Return the ranks of each key, the most first."""
    counted = Counter(keys.values())
    ranks: Callable[[Hashable], tuple[int, ...]] = lambda key: tuple(  # noqa: E731
        sorted(rank for rank, one in keys.items() if one == key)
    )
    return [ranks(key) for key, _ in sorted(counted.items(), key=lambda one: (-one[1], ranks(one[0])))]


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
