"""What goes and what stays: data behind a verified commit only, the record and the index never."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.register import KeptCheckpoint, kept_of
from lakeckpt.checkpoint.format.verified_reads import fetch_register
from lakeckpt.checkpoint.ledger.verify import VerifyReport, verify
from lakeckpt.checkpoint.persist import persist
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.commit import Collected
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.checkpoint.persist.retention import Retention
from lakeckpt.errors import (
    AttemptSuperseded,
    CheckpointDamaged,
    ConfigError,
    DamageWarning,
    RetentionWarning,
    SaveFailed,
    StorageError,
)
from lakeckpt.testing.faulty_storage import FaultyStorage, Killed, StoreFault
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.patience import PATIENCE_S


def folders(storage: MemoryStorage) -> set[str]:
    return {
        name.split("/", 1)[1].rpartition("/")[0] for name in storage.objects if name.startswith(("parts/", "objects/"))
    }


def retention(storage: MemoryStorage) -> Retention:
    """The retention of the attempt that made the newest commit."""
    tip = read_history(storage).tip
    return Retention(
        storage, Attempt(run=tip.run, number=tip.attempt, last=tip.slot, parent=tip.parent, seed=0, recorded=tip.step)
    )


def run(storage: Any, steps: int, *, value: Any = 1.0, **options: Any) -> None:
    saver = manager(storage, {"n": Counter([value])}, persist_every=1, **options)
    saver.restore()
    for _ in range(steps):
        saver.step()


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_keep_their_data_and_all_keep_their_record(keep: int) -> None:
    storage = MemoryStorage()
    storage.put("index/abc.lkc", [b"x"])
    storage.put("parts/readme", [b"not ours"])
    run(storage, 7, keep=keep)
    expected = {f"0000000000/{step:012d}-{step - 1:06d}" for step in range(8 - keep, 8)}
    assert {name for name in folders(storage) if name} == expected
    assert len([name for name in storage.objects if name.startswith("log/")]) == 8
    assert storage.objects["index/abc.lkc"] == b"x" and storage.objects["parts/readme"] == b"not ours"
    assert [one.step for one in read_history(storage).chain] == list(range(1, 8))


def test_leftovers_of_dead_attempts_and_abandoned_branches_go_with_the_next_commit() -> None:
    storage = MemoryStorage()
    run(storage, 3, keep=2)
    storage.put("objects/0000000000/000000000004-000003/00000-0000-ab.safetensors", [b"never committed"])
    storage.put("parts/0000000000/000000000004-000003/00000.lkc", [b"never committed"])
    run(storage, 1, keep=2)
    assert folders(storage) == {"0000000000/000000000003-000002", "0000000004/000000000004-000000"}


def test_what_a_newer_attempt_writes_is_never_touched() -> None:
    storage = MemoryStorage()
    run(storage, 2, keep=1)
    newest = read_history(storage).tip
    storage.put("parts/0000000009/000000000004-000000/00000.lkc", [b"of another"])
    storage.put("parts/0000000000/000000000003-000002/00000.lkc", [b"of our next save"])
    retention(storage).prune(newest, fetch_register(storage, newest))
    assert len(folders(storage)) == 3


def test_a_superseded_attempt_removes_nothing() -> None:
    storage = MemoryStorage()
    run(storage, 3, keep=3)
    newest = read_history(storage).tip
    manager(storage, {"n": Counter()}).restore()
    before = dict(storage.objects)
    register = fetch_register(storage, newest)
    assert retention(storage).prune(newest, replace(register, kept=register.kept[-1:])) == 0
    assert storage.objects == before


@pytest.mark.parametrize("damaged", ["register", "entry"])
def test_a_register_that_cannot_be_read_keeps_everything_until_the_rule_needs_it_no_more(damaged: str) -> None:
    storage = MemoryStorage()
    run(storage, 3, keep=3)
    newest = read_history(storage).tip
    keeps = retention(storage)
    keeps._attempt.parent = newest.slot
    storage.objects[newest.save.register_path if damaged == "register" else slot_path(newest.slot)] = b"?"
    before, nothing = dict(storage.objects), Collected(heads=(), digests=b"")
    for step, is_known in ((4, False), (5, True)):
        one = KeptCheckpoint(slot=step, attempt=newest.attempt, step=step, number=step - 1)
        register = keeps.register(one, nothing, Keep(last=2))
        commit = replace(newest, slot=step, step=step, number=step - 1, parent=keeps._attempt.parent)
        assert {1, 2, 3} <= set(range(*register.slots.pairs()[0])) or is_known
        if is_known:
            assert keeps.prune(commit, register) == 2 * 3 and not folders(storage)
        else:
            with pytest.raises(CheckpointDamaged, match=r"slots \d to 3 need is not known.* everything stays until"):
                keeps.prune(commit, register)
            assert storage.objects == before
        keeps._attempt.parent = step


def test_a_save_that_is_not_committed_removes_nothing() -> None:
    inner = MemoryStorage()
    run(inner, 2, keep=1)
    before = folders(inner)
    faults = {("put_new", n): StoreFault.ERROR for n in range(3, 6)}  # behind the attempt's two entries
    with pytest.raises(SaveFailed):
        run(FaultyStorage(inner, fail_at=faults), 1, keep=1)
    assert before < folders(inner)
    zombie = manager(inner, {"n": Counter()}, keep=1)
    zombie.restore()
    manager(inner, {"n": Counter()}).restore()
    before = folders(inner)
    with pytest.raises(AttemptSuperseded):
        zombie.save()
    assert before < folders(inner)


def test_a_failure_to_remove_does_not_fail_the_save() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, fail_at={("delete", 1): StoreFault.ERROR})
    with pytest.warns(RetentionWarning, match="could not be removed") as told:
        run(storage, 3, keep=1)
    assert len(told) == 1, "the third save removed what the second could not"
    assert read_history(inner).tip.step == 3 and len(folders(inner)) == 1


TENSOR = torch.ones(2)


def half_removed(deletes: int) -> MemoryStorage:
    """A run of which retention was killed at the ``deletes``-th file: of checkpoints 2 and 3 something may be left."""
    storage = MemoryStorage()
    run(storage, 3, keep=2, value=TENSOR)
    with pytest.raises(Killed):
        run(FaultyStorage(storage, fail_at={("delete", deletes): StoreFault.KILL}), 1, keep=1, value=TENSOR)
    return storage


def statuses(report: VerifyReport) -> dict[int, str]:
    return {one.step: one.status for one in report.checkpoints}


def test_a_kill_while_old_data_are_removed_is_no_damage() -> None:
    """Each checkpoint is one file of tensors and one part; the files of tensors go first."""
    found = []
    for deletes in range(1, 5):
        report = verify(half_removed(deletes))
        assert report.every_damage == () and report.exit_status == 0
        found.append(statuses(report))
    assert [(one[2], one[3], one[4]) for one in found] == [
        ("intact", "intact", "intact"),
        ("removed", "intact", "intact"),
        ("removed", "removed", "intact"),
        ("removed", "removed", "intact"),
    ]
    storage = half_removed(2)
    run(storage, 1, keep=1, value=TENSOR)
    assert len(folders(storage)) == 1


def test_what_is_left_of_a_half_removed_checkpoint_is_still_read() -> None:
    storage = half_removed(2)
    (part,) = (path for path in storage.objects if path.endswith("00000.lkc") and "000000000002-" in path)
    storage.objects[part] = storage.objects[part][:-1]
    report = verify(storage)
    assert [one.path for one in report.every_damage] == [part] and statuses(report)[2] == "damaged"


def test_a_missing_file_of_a_checkpoint_that_is_kept_is_damage() -> None:
    storage = MemoryStorage()
    run(storage, 4, keep=2, value=TENSOR)
    (file,) = (path for path in storage.objects if path.startswith("objects/") and "000000000003-" in path)
    storage.delete(file)
    report = verify(storage)
    assert [one.path for one in report.every_damage] == [file] and statuses(report)[3] == "damaged"


def test_one_of_every_so_many_steps_and_the_best_keep_their_data_too() -> None:
    storage = MemoryStorage()
    rule = Keep(last=1, every=4, best=2)
    metrics = [5.0, 1.0, float("nan"), 3.0, None, 1.0, 4.0, 9.0, 2.0]
    saver = manager(storage, {"n": Counter([TENSOR])}, persist_every=1, keep=rule)
    saver.restore()
    for metric in metrics[:7]:
        saver.step(metric=metric)
    assert [step for step, status in statuses(verify(storage)).items() if status == "intact"] == [2, 4, 6, 7]
    again = manager(storage, {"n": Counter([TENSOR])}, persist_every=1, keep=rule)  # a new attempt has read nothing yet
    assert again.restore() == 7
    for metric in metrics[7:]:
        again.step(metric=metric)
    assert [step for step, status in statuses(verify(storage)).items() if status == "intact"] == [2, 4, 6, 8, 9]
    tip = read_history(storage).tip
    assert tip is not None and (tip.keep, tip.metric) == (rule, 2.0)


def test_the_highest_may_be_the_best() -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"n": Counter([1])}, keep=Keep(last=1, best=1, best_is="highest"))
    saver.restore()
    for metric in (1, 3, 2):
        saver.step()
        saver.save(metric=metric)
    assert sorted(step for step, status in statuses(verify(storage)).items() if status == "intact") == [2, 3]


def metrics_of(storage: Any) -> dict[int, float | None]:
    return {one.step: one.metric for one in read_history(storage).chain}


@pytest.mark.parametrize("captures", [False, True])
def test_the_metric_of_a_cut_counts_where_the_with_ends_or_a_save_gives_none(captures: bool, tmp_path: Path) -> None:
    storage = MemoryStorage()
    more = {"capture_every": 1, "arenas": tmp_path, "timeout_s": PATIENCE_S} if captures else {}
    for metrics in ((9.0, 1.0), (2.0, 5.0), (3.0, torch.tensor(4.0, requires_grad=True) * 2)):
        saver = manager(storage, {"n": Counter([TENSOR])}, keep=Keep(last=1, best=1), **more)
        with saver:
            saver.restore()
            for metric in metrics:
                saver.step(metric=metric)
    assert metrics_of(storage) == {2: 1.0, 4: 5.0, 6: 8.0}
    assert [step for step, status in statuses(verify(storage)).items() if status == "intact"] == [2, 6]


def test_a_metric_is_of_its_cut_alone_and_a_save_may_give_another() -> None:
    storage, running = MemoryStorage(), torch.tensor(7.0)
    saver = manager(storage, {"n": Counter([1])})
    saver.restore()
    saver.step(metric=running)
    running += 1  # of the next step
    saver.save()
    saver.step(metric=6.0)
    saver.save(metric=5.0)
    saver.step(metric=4.0)
    saver.step()
    saver.save()
    assert metrics_of(storage) == {1: 7.0, 2: 5.0, 4: None}


NO_NUMBERS = ["low", [1.0], torch.ones(2), pytest.param(10**400, id="huge"), 1j, torch.ones(1, dtype=torch.complex64)]


@pytest.mark.parametrize("metric", [*NO_NUMBERS, torch.ones((), device="meta")])
def test_a_metric_that_is_no_number_is_refused_before_the_cut(metric: Any) -> None:
    saver = manager(MemoryStorage(), {"n": Counter()})
    saver.restore()
    with pytest.raises(ConfigError, match="metric is a number"):
        saver.step(metric=metric)
    assert saver.steps_done == 0


def test_a_checkpoint_that_a_rule_keeps_is_missed() -> None:
    storage = MemoryStorage()
    run(storage, 7, keep=Keep(last=1, every=3), value=TENSOR)
    for step, status in ((3, "damaged"), (6, "damaged")):
        (file,) = (path for path in storage.objects if path.startswith("objects/") and f"{step:012d}-" in path)
        storage.delete(file)
        assert statuses(verify(storage))[step] == status


def lost(storage: MemoryStorage, step: int) -> dict[int, str]:
    """What is found where all data of that step are lost; they are there again then."""
    gone = {name: data for name, data in storage.objects.items() if f"/{step:012d}-" in name}
    assert gone
    for name in gone:
        storage.delete(name)
    found = statuses(verify(storage))
    storage.objects |= gone
    return found


def test_a_checkpoint_of_which_all_is_lost_is_missed_where_every_rule_since_keeps_it() -> None:
    storage = MemoryStorage()
    run(storage, 5, keep=2, value=TENSOR)
    assert statuses(verify(storage)) == dict.fromkeys([1, 2, 3], "removed") | dict.fromkeys([4, 5], "intact")
    assert lost(storage, 4)[4] == "damaged" and lost(storage, 5)[5] == "damaged"
    run(storage, 1, keep=9, value=TENSOR)  # what an earlier rule let go is not missed by a later one
    assert statuses(verify(storage)) == dict.fromkeys([1, 2, 3], "removed") | dict.fromkeys([4, 5, 6], "intact")
    assert lost(storage, 4)[4] == "damaged"
    run(storage, 1, keep=1, value=TENSOR)
    assert statuses(verify(storage)) == dict.fromkeys(range(1, 7), "removed") | {7: "intact"}


def test_what_a_branch_had_removed_before_it_was_given_up_is_not_missed() -> None:
    storage = MemoryStorage()
    run(storage, 3, keep=2, value=TENSOR)
    run(storage, 1, keep=2, value=TENSOR)  # its commit removes step 2
    (file,) = (path for path in storage.objects if path.startswith("objects/") and "000000000004-" in path)
    storage.delete(file)
    saver = manager(storage, {"n": Counter([TENSOR])}, keep=2)
    with pytest.warns(DamageWarning):
        assert saver.restore() == 3
    assert [one.step for one in read_history(storage).chain] == [1, 2, 3]
    assert statuses(verify(storage)) == {1: "removed", 2: "removed", 3: "intact", 4: "removed"}


class Going(MemoryStorage):
    """The run goes on when ``at`` is read."""

    def __init__(self, objects: dict[str, bytes], at: str) -> None:
        super().__init__()
        self.objects, self.at = dict(objects), at

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        if path == self.at:
            self.at = ""
            run(self, 2, keep=2, value=TENSOR)
        return super().read(path, start, stop, etag=etag)


def test_what_a_run_that_goes_on_removes_meanwhile_is_not_missed() -> None:
    storage = MemoryStorage()
    run(storage, 3, keep=2, value=TENSOR)
    (part,) = (path for path in storage.objects if path.endswith("00000.lkc") and "000000000002-" in path)
    report = verify(Going(storage.objects, part))
    assert report.every_damage == () and statuses(report) == {1: "removed", 2: "removed", 3: "removed"}
    going = Going(storage.objects, part)
    going.objects[part] += b"x"
    going.delete = lambda path: None  # type: ignore[method-assign]
    assert statuses(verify(going))[2] == "damaged"


@pytest.mark.parametrize(
    "wrong",
    [{"last": 0}, {"last": True}, {"every": 0}, {"every": 2.5}, {"best": -1}, {"best_is": "least"}],
)
def test_a_rule_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"keep|the best is"):
        Keep(**wrong)


class Late:
    """A tensor of one element that cannot be looked at, which shows when it is."""

    is_meta = False

    def numel(self) -> int:
        return 1

    def is_complex(self) -> bool:
        return False

    def detach(self) -> Late:
        return self

    def clone(self) -> Late:
        return self

    def __float__(self) -> float:
        raise RuntimeError("an error of the device")


@pytest.mark.parametrize("captures", [False, True])
def test_a_metric_that_turns_out_to_be_none_when_it_is_saved_is_told_to_all_ranks(
    captures: bool, tmp_path: Path
) -> None:
    storage, found = MemoryStorage(), {}
    waiter = EventWaiter(storage)
    more = {"capture_every": 1, "arenas": tmp_path, "timeout_s": PATIENCE_S} if captures else {}

    def body(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, {"n": Counter([TENSOR])}, exchange=exchange, waiter=waiter, **more)
        saver.restore()
        saver.step(metric=Late() if rank == 0 else 1.0)
        try:
            saver.save()
        except Exception as error:
            found[rank] = error
        saver.step(metric=2.0)
        saver.save()
        saver.close()

    good(run_ranks(2, body))
    assert isinstance(found[0], ConfigError) and "metric is a number" in str(found[0])
    assert isinstance(found[1], ConfigError) and "rank 0" in str(found[1])
    assert metrics_of(storage) == {2: 2.0}


@pytest.mark.parametrize("metric", NO_NUMBERS)
def test_a_rank_whose_metric_is_refused_where_a_save_falls_may_call_again_and_all_save(metric: Any) -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, {"n": Counter()}, exchange=exchange, waiter=EventWaiter(storage), persist_every=1)
        saver.restore()
        if rank == 0:
            with pytest.raises(ConfigError, match="metric is a number"):
                saver.step(metric=metric)
        saver.step(metric=3.0)

    good(run_ranks(2, body))
    assert metrics_of(storage) == {1: 3.0}


@pytest.mark.parametrize("metric", NO_NUMBERS)
def test_a_metric_that_is_no_number_is_refused(metric: Any) -> None:
    saver = manager(MemoryStorage(), {"n": Counter()})
    saver.restore()
    with pytest.raises(ConfigError, match="metric is a number"):
        saver.save(metric=metric)


@given(
    steps=st.lists(st.integers(1, 40), unique=True, min_size=1, max_size=14).map(sorted),
    metrics=st.lists(st.none() | st.floats(), min_size=14, max_size=14),
    rule=st.builds(
        Keep,
        last=st.integers(1, 4),
        every=st.none() | st.integers(1, 12),
        best=st.integers(0, 3),
        best_is=st.sampled_from(["lowest", "highest"]),
    ),
    data=st.data(),
)
def test_what_is_kept_does_not_change_when_some_of_the_rest_is_gone(
    steps: list[int], metrics: list[float | None], rule: Keep, data: st.DataObject
) -> None:
    chain = [
        SimpleNamespace(slot=number, step=step, metric=metric)
        for number, (step, metric) in enumerate(zip(steps, metrics, strict=False))
    ]
    kept = kept_of(chain, rule)
    rest = sorted({one.slot for one in chain} - kept)
    gone = data.draw(st.sets(st.sampled_from(rest))) if rest else set()
    assert kept_of([one for one in chain if one.slot not in gone], rule) == kept
    assert chain[-1].slot in kept and len(kept) >= min(rule.last, len(chain))


class Full(MemoryStorage):
    """A store with room for so many bytes of files of tensors."""

    room = 10**9

    def put(self, path: str, chunks: Iterable[Any]) -> int:
        data = b"".join(bytes(chunk) for chunk in chunks)
        held = sum(len(one) for at, one in self.objects.items() if at.startswith("objects/"))
        if path.startswith("objects/") and held + len(data) > self.room:
            raise StorageError(f"cannot write {path!r}: No space left on device")
        return super().put(path, [data])


def test_saves_that_failed_for_want_of_room_do_not_keep_later_ones_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persist, "FILE_BYTES", 40_000)
    storage = Full()

    def body(rank: int, exchange: HubExchange) -> None:
        own = Counter()
        waiter = EventWaiter(storage)
        saver = manager(storage, {"own": own}, keep=1, exchange=exchange, waiter=waiter, timeout_s=5)
        saver.restore()
        for step in range(1, 8):
            own.value = {str(n): torch.full((8_000,), 10.0 * step + rank) for n in range(4)}  # 32 KB each: four files
            saver.step()
            exchange.everyone({})
            if rank == 0:
                # Two checkpoints have room, but for a while somebody else takes that of one file.
                storage.room = 2 * 2 * 4 * 33_000 - (33_000 if 2 <= step <= 4 else 0)
            exchange.everyone({})
            if 2 <= step <= 4:
                with pytest.raises(SaveFailed, match="No space left on device"):
                    saver.save()
                assert saver.latest().step == 1
            else:
                saver.save()

    good(run_ranks(2, body))
    assert verify(storage).every_damage == () and read_history(storage).tip.step == 7


def test_files_of_a_commit_whose_answer_was_lost_stay_since_it_may_come_late() -> None:
    class Late(MemoryStorage):
        """Puts of entries fail while it is ``silent``, and happen when the next one comes."""

        silent = False
        late: tuple[str, bytes] | None = None

        def put_new(self, path: str, data: bytes) -> None:
            if self.silent:
                self.late = (path, data)
                raise StorageError("no answer")
            if self.late is not None:
                self.objects.setdefault(*self.late)
            super().put_new(path, data)

    storage, counter = Late(), Counter(torch.zeros(100))
    saver = manager(storage, {"n": counter}, keep=1)
    saver.restore()
    for step in (1, 2, 3, 4):
        counter.value = torch.full((100,), float(step))
        saver.step()
        storage.silent = step == 2
        if step in (2, 3):
            with pytest.raises(
                SaveFailed, match="no answer" if step == 2 else "whose answer was lost and which came late"
            ):
                saver.save()
            assert step == 2 or (verify(storage).every_damage, read_history(storage).tip.step) == ((), 2)
        else:
            saver.save()
    assert verify(storage).every_damage == () and read_history(storage).tip.step == 4
