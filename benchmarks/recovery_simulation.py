"""How much of a large job's time do faults cost?  ``python -m benchmarks.recovery_simulation [--json FILE]``

Jobs of 256 to 16,384 GPUs are simulated with simpy, at published rates of faults, until each has had ``--faults`` of
them. The clock is simulated; what the job goes back to is not: `decide` chooses the cut from the facts of all nodes,
`placement` says which nodes keep what, and `level_of` decides after deaths without progress. A node counts as one rank.

Compared are checkpoints alone (synchronous saves); memory of each node for itself; nodes that read from others what
replicas hold ("natural", half of the nodes are replicas of the other half); and "copy" and "3+1" of a state that each
node has once. Printed are the effective training time, the seconds of a fault, and which of them are ours: deciding,
restoring, and steps done again. The others are perception, new processes, and the network of GPUs. Beside it are 45 s
a fault and 99.5 %. Then each input is halved and doubled. `Inputs` says where each comes from.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import simpy

from benchmarks.measure import show
from lakeckpt.recovery.decide import Decision, decide
from lakeckpt.recovery.facts import CutId, Holding, NodeFacts
from lakeckpt.recovery.faults import BatchAt, Cause, FaultNote
from lakeckpt.recovery.placement import NodePlace, PeerGroup, groups_of
from lakeckpt.recovery.progress import Level, level_of
from lakeckpt.recovery.shares import ShareList

Scheme = Literal["checkpoints", "memory", "natural", "copy", "3+1"]
Kind = Literal["process", "hang", "node", "rack", "poison"]
_Fault = tuple[Kind, tuple[int, ...]]
"""What it is, and the nodes that are lost with it, by number."""
SCHEMES: tuple[Scheme, ...] = ("checkpoints", "memory", "natural", "copy", "3+1")
SIZES = (256, 1024, 4096, 16384)
GPUS_OF_NODE, NODES_OF_RACK = 8, 8
DAY_S = 86_400.0
MARK_S, MARK = 45.0, 0.995
LLAMA = "Llama 3 (arXiv 2407.21783, table 5)"


def given(value: float, source: str) -> Any:
    """Return a field that says where its value comes from."""
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is not ours to choose, or was measured."""

    faults_a_gpu_day: float = given(419 / 54 / 16384, f"{LLAMA}: 419 in 54 days on 16,384 GPUs")
    hang: float = given(7 / 419, f"{LLAMA}: NCCL watchdog timeouts, of all faults")
    process: float = given(56 / 419, f"{LLAMA}: software and dependencies, of all faults; the rest loses its node")
    rack: float = given(3.5 / 419, f"{LLAMA}: 35 of switches and cables; assumed: a tenth is a rack")
    poison: float = given(0.002, "assumed: faults that come again at one micro-batch")
    step_s: float = given(6.2, "Llama 3 405B: 16.8 M tokens a step, 400 TFLOP/s a GPU, 6 FLOP a token and parameter")
    state_gb: float = given(4.0, f"{LLAMA[:7]}, section 3.3.1: 1 MB to 4 GB of a GPU's state; the most")
    storage_gb_s: float = given(2000 / 16384, "Llama 3, section 3.3.1: Tectonic, 2 TB/s sustained; of a GPU's share")
    checkpoint_s: float = given(1800.0, "assumed: seconds from one checkpoint to the next")
    capture_s: float = given(0.004, "docs/benchmarks/gpu-captures.json: by which a capture of 4.3 GB held up a step")
    peers_every_s: float = given(10.0, "the default of lakeckpt: from one copy on other nodes to the next")
    node_gb_s: float = given(5.0, "assumed: 40 Gbit/s of a node's network for shares of others")
    memory_gb_s: float = given(1.0, "assumed: host memory to the GPU with checksums, a GPU")
    perceived_s: float = given(0.3, "measured: torchrun notices a dead process (docs/design/0030)")
    node_lost_s: float = given(11.4, "measured: an agent perceives that the cable of another node was cut")
    hang_s: float = given(600.0, "torch: the default time limit of collectives over NCCL")
    processes_s: float = given(2.0, "measured: `lakeckpt run`, new processes, model and optimizer")
    spare_s: float = given(5.0, "a spare node joins: the last call of the rendezvous under `lakeckpt run`")
    group_s: float = given(30.0, "MegaScale (arXiv 2402.15627): less than 30 s for 10,000 GPUs; linear in their number")
    decided_s: float = given(5.0, "measured: benchmarks.decisions, 16,384 ranks on two cores; linear in their number")
    operator_s: float = given(1800.0, "assumed: until a person has started a job again that has stopped itself")


@dataclass(slots=True)
class Lost:
    """Seconds that trained nothing, by reason."""

    by: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    faults: int = 0
    to_storage: int = 0
    steps_again: int = 0

    @property
    def ours_s(self) -> float:
        """What a fault costs by what lakeckpt does; saving comes on top of it."""
        return sum(self.by[one] for one in ("decided", "restored", "steps again"))


class Job:
    """One job under simulation. Time in steps is exact: a step that was not finished is lost."""

    def __init__(self, env: simpy.Environment, scheme: Scheme, gpus: int, inputs: Inputs, faults: int) -> None:
        self._env, self._scheme, self._inputs, self._gpus = env, scheme, inputs, gpus
        self._names = [f"n{at:04d}" for at in range(gpus // GPUS_OF_NODE)]
        self._rng = random.Random(gpus)  # the same faults for all schemes
        self._left = faults
        self._groups = self._place()
        self._kept = self._who_keeps()
        self.lost, self.step = Lost(), 0
        self._attempt = self._begun = 0
        self._captured = self._copied = -1  # the steps of the newest cut, on each node, and on others, too
        self._older = [0]  # steps of checkpoints
        self._deaths: list[FaultNote] = []
        self._poisoned: int | None = None
        self._gone: set[int] = set()
        self._kind: Kind = "process"
        self._shares = ShareList.of([b"%d" % (at % -(-len(self._names) // 2)) for at in range(len(self._names))])
        self.process = env.process(self._run())
        env.process(self._faults())

    def _place(self) -> tuple[PeerGroup, ...]:
        if self._scheme not in ("copy", "3+1"):
            return ()
        places = [NodePlace(node=one, domain=f"r{at // NODES_OF_RACK}") for at, one in enumerate(self._names)]
        return groups_of(places, self._scheme)

    def _who_keeps(self) -> dict[int, PeerGroup]:
        at = {name: number for number, name in enumerate(self._names)}
        return {at[member]: group for group in self._groups for member in group.members}

    # --- faults

    def _faults(self) -> Generator[simpy.Event, Any, None]:
        """Interrupt the job at random moments, also while it recovers."""
        rate = self._inputs.faults_a_gpu_day * self._gpus / DAY_S
        while self._left:
            yield self._env.timeout(self._rng.expovariate(rate))
            self._left -= 1
            kind = self._kind_of(self._rng.random())
            at = self._rng.randrange(len(self._names))
            rack = range(at - at % NODES_OF_RACK, min(at - at % NODES_OF_RACK + NODES_OF_RACK, len(self._names)))
            nodes = [at] if kind == "node" else rack if kind == "rack" else []
            self.process.interrupt((kind, tuple(nodes)))

    def _kind_of(self, drawn: float) -> Kind:
        given = self._inputs
        shares: tuple[tuple[Kind, float], ...] = (
            ("poison", given.poison), ("rack", given.rack), ("hang", given.hang), ("process", given.process)
        )  # fmt: skip
        for kind, share in shares:
            if drawn < share:
                return kind
            drawn -= share
        return "node"

    # --- the job

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while self._left:
            began = self._env.now
            try:
                until = None if self._poisoned is None else self._seconds_to(self._poisoned + 1)
                yield self._env.event() if until is None else self._env.timeout(until)
                fault: _Fault = ("poison", ())
            except simpy.Interrupt as interrupt:
                fault = cast(_Fault, interrupt.cause)
            self._train(self._env.now - began)
            self._note(fault)
            while True:
                begun = self._env.now
                try:
                    yield from self._recover()
                    break
                except simpy.Interrupt as interrupt:
                    self.lost.by["recoveries cut short"] += self._env.now - begun
                    self._note(cast(_Fault, interrupt.cause))

    @property
    def _period_s(self) -> float:
        captures = self._scheme != "checkpoints"
        return self._inputs.step_s + (self._inputs.capture_s if captures else 0.0)

    @property
    def _saves(self) -> tuple[int, float]:
        """How many steps lie between two checkpoints, and for how long a save holds up the training."""
        stall = self._inputs.state_gb / self._inputs.storage_gb_s if self._scheme == "checkpoints" else 0.0
        return max(1, round(self._inputs.checkpoint_s / self._inputs.step_s)), stall

    def _seconds_to(self, step: int) -> float:
        every, stall = self._saves
        steps = max(1, step - self.step)
        return steps * self._period_s + steps // every * stall

    def _train(self, seconds: float) -> None:
        """Finish the steps of so many seconds, at the end of which a fault came."""
        every, stall = self._saves
        turn_s = every * self._period_s + stall
        turns, rest_s = divmod(seconds, turn_s)
        last = min(every, int(rest_s / self._period_s))
        done = int(turns) * every + last
        if self._poisoned is not None:
            done = min(done, max(0, self._poisoned - self.step))
        self._older += [self.step + turn * every for turn in range(1, done // every + 1)]
        if self._groups:
            copy_steps = max(1, round(max(self._inputs.peers_every_s, self._copying_s) / self._period_s))
            whole = int((done * self._period_s - self._copying_s) // (copy_steps * self._period_s))
            self._copied = self.step + whole * copy_steps if whole > 0 else self._copied
        saving = seconds - done * self._inputs.step_s
        self.lost.by["saving"] += min(saving, turns * stall + done * (self._period_s - self._inputs.step_s))
        self.lost.by["step under way"] += max(0.0, saving - turns * stall)
        self.step += done
        if self._scheme != "checkpoints":
            self._captured = self.step

    @property
    def _copying_s(self) -> float:
        """For how long a copy, or parity of a third of the bytes, is under way between nodes."""
        part = 1.0 if self._scheme == "copy" else 1 / 3
        return GPUS_OF_NODE * self._inputs.state_gb * part / self._inputs.node_gb_s

    def _pay(self, why: str, seconds: float) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(seconds)
        self.lost.by[why] += seconds

    def _note(self, cause: _Fault) -> None:
        """Take note of a fault, as the dying rank would."""
        kind, nodes = cause
        if kind == "poison" and self._poisoned is None:
            self._poisoned = self.step
        self._gone.update(nodes)
        self._kind = kind
        self.lost.faults += 1
        names: dict[str, Cause] = {"process": "signal", "hang": "hang", "poison": "exception"}
        at = BatchAt(reader="reader", epoch=0, step=self.step, rank=0, world=len(self._names))
        self._deaths.append(
            FaultNote(
                attempt=self._attempt, rank=0, world=len(self._names), node=self._names[0], at_s=self._env.now,
                cause=names.get(kind, "lost node"), what={"process": "SIGSEGV", "poison": "ValueError"}.get(kind, ""),
                step=self.step, begun=self._begun, batch=at,
            )
        )  # fmt: skip

    def _recover(self) -> Generator[simpy.Event, Any, None]:
        given, scale = self._inputs, self._gpus / 16384
        lost = {"node": given.node_lost_s, "rack": given.node_lost_s, "hang": given.hang_s}
        yield from self._pay("perceived", lost.get(self._kind, given.perceived_s))
        yield from self._pay("processes", given.processes_s + (given.spare_s if self._gone else 0))
        yield from self._pay("group", given.group_s * self._gpus / 10_000)
        level = level_of(self._deaths, may_exclude=True)
        if level.stops:
            self._deaths, self._poisoned = [], None
            yield from self._pay("operator", given.operator_s)
        if level.excludes:
            self._poisoned = None
        yield from self._pay("decided", given.decided_s * scale)
        decision = self._decided(level)
        back, seconds = self._read(decision, level)
        yield from self._pay("restored", seconds)
        self.lost.by["steps again"] += (self.step - back) * given.step_s
        self.lost.steps_again += self.step - back
        self.lost.to_storage += decision.cut is None
        self.step, self._begun, self._attempt = back, back, self._attempt + 1
        self._gone, self._copied = set(), -1
        self._captured = -1 if self._scheme == "checkpoints" else back

    # --- what it goes back to

    def _decided(self, level: Level) -> Decision:
        if self._scheme == "checkpoints" or level.go_back is not None:
            return Decision()
        nodes = [self._facts(at) for at in range(len(self._names))]
        return decide(nodes, world_size=len(nodes), takes=lambda cut: True, recorded=self._older[-1])

    def _facts(self, at: int) -> NodeFacts:
        """Return what a node states. What a group can compute from parity counts as held by the member that does it."""
        name, shares = self._names[at], self._shares if self._scheme == "natural" else None
        lists = (shares.document,) if shares else ()
        held: dict[int, list[int]] = {}
        if at not in self._gone:
            for step in {self._captured, self._copied} - {-1}:
                held[step] = [at]
            if self._copied >= 0:
                held[self._copied] += self._rebuilt(at)
        holdings = tuple(
            Holding(
                cut=CutId(attempt=self._attempt, step=step), digest=b"d" * 16, world=len(self._names),
                ranks=tuple(sorted(ranks)), listed=shares.digest if shares else b"",
            )
            for step, ranks in sorted(held.items())
        )  # fmt: skip
        address = "" if self._scheme == "memory" else f"{name}:1"
        return NodeFacts(node=name, ranks=(at,), holdings=holdings, address=address, lists=lists)

    def _rebuilt(self, at: int) -> list[int]:
        group, name = self._kept[at], self._names[at]
        if not self._gone or not any(self._names[one] in group.members for one in self._gone):
            return []
        lost = {self._names[one] for one in self._gone}
        return [
            int(one[1:])
            for one in group.members
            if one in lost
            and group.survives(one, lost)
            and next(k for k in group.keepers(one) if k not in lost) == name
        ]

    def _read(self, decision: Decision, level: Level) -> tuple[int, float]:
        """Return the step that is gone back to, and how long reading it takes."""
        given = self._inputs
        if decision.cut is None:
            before = self.step + 1 if level.go_back is None else max(level.go_back, 1)
            back = max((one for one in self._older if one < before), default=0)
            self._older = [one for one in self._older if one <= back]
            return back, given.state_gb / given.storage_gb_s
        own = given.state_gb / given.memory_gb_s
        times = 3 if self._scheme == "3+1" else 1  # a share is computed from three streams
        elsewhere = times * GPUS_OF_NODE * given.state_gb / given.node_gb_s if self._gone else 0.0
        return decision.cut.step, own + elsewhere


def simulated(scheme: Scheme, gpus: int, inputs: Inputs, faults: int) -> dict[str, Any]:
    """Return what faults cost a job."""
    env = simpy.Environment()
    job = Job(env, scheme, gpus, inputs, faults)
    env.run(job.process)
    env_s = env.now
    lost, trained = job.lost, job.step * inputs.step_s
    of_faults = env_s - trained - lost.by["saving"]
    return {
        "scheme": scheme, "gpus": gpus, "days": env_s / DAY_S, "faults": lost.faults,
        "effective": trained / env_s, "fault_s": of_faults / max(1, lost.faults),
        "ours_s": lost.ours_s / max(1, lost.faults),
        "ours": (lost.ours_s + lost.by["saving"]) / max(1e-9, env_s - trained), "to_storage": lost.to_storage,
        "steps_again": lost.steps_again / max(1, lost.faults),
        "saving": lost.by["saving"] / env_s, "seconds": dict(lost.by),
    }  # fmt: skip


def sensitivity(scheme: Scheme, gpus: int, faults: int) -> list[dict[str, Any]]:
    """Return the effective time with each input halved and doubled, the most telling input first."""
    found = []
    for one in fields(Inputs):
        base = getattr(Inputs(), one.name)
        half, double = (
            simulated(scheme, gpus, replace(Inputs(), **{one.name: base * by}), faults)["effective"] for by in (0.5, 2)
        )
        found.append(
            {"input": one.name, "value": base, "source": one.metadata["source"], "half": half, "double": double}
        )
    return sorted(found, key=lambda row: -abs(row["half"] - row["double"]))


def rows_of(found: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the table of schemes."""
    return [
        (
            f"{one['gpus']:,}", one["scheme"], f"{one['days']:.0f}", f"{one['fault_s']:.0f} s",
            f"{one['ours_s']:.0f} s", "yes" if one["fault_s"] <= MARK_S else "no", f"{one['effective']:.2%}",
            "yes" if one["effective"] >= MARK else "no", f"{one['steps_again']:.1f}",
            f"{one['to_storage']}/{one['faults']}",
        )
        for one in found
    ]  # fmt: skip


def main() -> None:
    """Simulate, print tables, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=list(SIZES), help="sizes of jobs (default: 256 to 16384)"
    )
    parser.add_argument("--faults", type=int, default=60, help="of each job (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    options = parser.parse_args()
    found = [simulated(scheme, gpus, Inputs(), options.faults) for gpus in options.gpus for scheme in SCHEMES]
    head = (
        "GPUs",
        "state from",
        "days",
        "a fault",
        "of it ours",
        "<= 45 s",
        "effective",
        ">= 99.5 %",
        "steps",
        "storage",
    )
    show("What faults cost", head, rows_of(found))
    some = sorted(options.gpus)[-2:][0]
    changed = sensitivity("copy", some, options.faults // 2)
    rows = [(one["input"], f"{one['value']:.4g}", f"{one['half']:.2%}", f"{one['double']:.2%}") for one in changed]
    show(f'Effective time of "copy" on {some:,} GPUs', ("input", "value", "halved", "doubled"), rows)
    if options.json is not None:
        plain = {"inputs": asdict(Inputs()), "found": found, "sensitivity": changed}
        options.json.write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
