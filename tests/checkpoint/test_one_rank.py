"""A job of one rank: restored runs go on bit by bit, whatever is saved; refusals change nothing."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import list_slots, slot_path
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import (
    AttemptSuperseded,
    CheckpointDamaged,
    CheckpointMismatch,
    ConfigError,
    DamageWarning,
    NewerFormat,
    SaveFailed,
    StateMismatch,
    StorageError,
    UnsupportedValue,
)
from lakeckpt.testing.faulty_storage import FaultyStorage, StoreFault
from lakeckpt.wire.envelope import dumps
from tests.checkpoint.rig import Counter, MemoryStorage, Reader, manager, train_step, training
from tests.checkpoint.seams import believing


def everything(*, seed: int = 0) -> dict[str, Any]:
    return training(seed=seed) | {
        "reader": Reader(),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0 + seed),
        "note": Counter({"nested": [1, (2, 3)], 5: np.arange(3), "none": None}),
    }


def run(objects: dict[str, Any], saver: CheckpointManager, steps: int) -> list[float]:
    losses = []
    batches = iter(objects["reader"])
    for _ in range(steps):
        receipt = next(batches)
        start = receipt.spans[0].start
        losses.append(train_step(objects, torch.randn(16, 8) + start / 100 + random.random() + np.random.rand()))
        saver.step()
    return losses


def test_a_restored_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    torch.manual_seed(5)
    with manager(tmp_path, everything()) as first:
        objects = first._objects
        assert first.restore() == 0
        run(objects, first, 7)
        first.save()
        expected = run(objects, first, 5)
        weights = copy.deepcopy(objects["model"].state_dict())
        moments = copy.deepcopy(objects["optimizer"].state_dict())
        rates = objects["scheduler"].state_dict()
        raise_slot = first.latest().slot  # the exit saves one more: take it away again
    (tmp_path / f"log/{raise_slot + 1:010d}.lkc").unlink()
    fresh = everything(seed=99)
    second = manager(tmp_path, fresh)
    assert second.restore() == 7
    assert fresh["reader"].state_dict()["step"] == 7
    assert run(fresh, second, 5) == expected
    for name, value in fresh["model"].state_dict().items():
        assert torch.equal(value, weights[name]), name
    for number, state in fresh["optimizer"].state_dict()["state"].items():
        assert all(torch.equal(value, moments["state"][number][key]) for key, value in state.items())
    assert fresh["scheduler"].state_dict() == rates
    assert fresh["scaler"].state_dict()["scale"] == 8.0
    assert fresh["note"].value["nested"] == [1, (2, 3)] and fresh["note"].value[5].tolist() == [0, 1, 2]


def test_a_fresh_place_restores_to_zero_and_begins_the_attempt() -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"n": Counter()})
    assert saver.latest() is None and saver.restore_report is None
    assert saver.restore() == 0
    assert list(storage.objects) == ["log/0000000000.lkc"]
    report = saver.restore_report
    assert report is not None and report.restored is None and report.damaged == () and report.attempt == 0


def test_the_latest_checkpoint_of_a_newer_version_is_not_passed_over_as_damage() -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"n": Counter()})
    saver.restore()
    saver.step()
    saver.save()
    storage.objects["log/0000000002.lkc"] = b"damaged"
    latest = saver.latest()
    assert latest is not None and latest.step == 1
    storage.objects["log/0000000003.lkc"] = dumps({}, kind="log", version=(99, 0))
    with pytest.raises(NewerFormat):
        saver.latest()


def test_steps_are_counted_over_attempts_and_the_policy_saves() -> None:
    storage = MemoryStorage()
    saved: list[tuple[int, int]] = []
    saver = manager(
        storage, {"n": Counter()}, persist_every=3, on_save=lambda info: saved.append((saver.steps_done, info.step))
    )
    saver.restore()
    for _ in range(7):
        saver.step()
    assert saved == [(3, 3), (6, 6)]
    again = manager(storage, {"n": Counter()}, persist_every=3)
    assert again.restore() == 6 and again.steps_done == 6
    for _ in range(3):
        again.step()
    assert again.latest().step == 9


def test_a_step_that_saves_nothing_touches_neither_storage_nor_states() -> None:
    storage = FaultyStorage(MemoryStorage())

    class Watched(Counter):
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return super().state_dict()

    watched = Watched()
    saver = manager(storage, {"n": watched, "reader": Reader()})
    saver.restore()
    calls = len(storage.calls)
    for _ in range(100):
        saver.step()
    assert len(storage.calls) == calls and watched.asked == 0


def test_leaving_well_saves_the_last_cut_once_and_leaving_badly_saves_nothing() -> None:
    storage = MemoryStorage()
    with manager(storage, {"n": Counter()}) as saver:
        saver.restore()
        saver.step()
        saver.save()
        saver.step()
    assert len(list_slots(storage)) == 3
    with manager(storage, {"n": Counter()}) as saver:
        assert saver.restore() == 2
    assert len(list_slots(storage)) == 5  # its begin and what it restored: nothing was trained or is saved
    saver = manager(storage, {"n": Counter()})
    saver.restore()
    saver.step()
    with pytest.raises(ZeroDivisionError), saver:
        raise ZeroDivisionError
    assert len(list_slots(storage)) == 7 and saver.latest().step == 2
    with manager(storage, {"n": Counter()}):
        pass  # never restored: nothing to save
    saver.close()
    for call in (saver.step, saver.save, saver.restore, saver.wait):
        with pytest.raises(ConfigError, match="closed"):
            call()


def test_what_a_reader_delivered_after_the_cut_is_not_in_the_cut() -> None:
    storage = MemoryStorage()
    reader = Reader()
    saver = manager(storage, {"reader": reader})
    saver.restore()
    batches = iter(reader)
    for _ in range(3):
        next(batches)
        saver.step()
    next(batches), next(batches)  # read ahead by the loop, not used
    saver.save()
    fresh = Reader()
    assert manager(storage, {"reader": fresh}).restore() == 3
    assert fresh.state_dict()["step"] == 3
    record = read_history(storage).tip.readers["reader"]
    assert sum(rows.size for rows in record.consumed().values()) == 30


def test_consumed_says_up_to_where_with_the_loops_own_prefetch() -> None:
    storage = MemoryStorage()
    reader = Reader()
    saver = manager(storage, {"reader": reader})
    saver.restore()
    receipts = list(iter(reader))[:10]
    for at in range(4):
        saver.step(receipts[2 * at + 1])  # two micro-batches per step
    saver.save()
    record = read_history(storage).tip.readers["reader"]
    assert record.state["step"] == 8
    assert [record.steps.frontier(step).step for step in (1, 2, 3, 4)] == [2, 4, 6, 8]
    assert len(record.steps.runs) == 1


def test_what_is_saved_before_anything_was_consumed_is_the_start() -> None:
    storage = MemoryStorage()
    reader = Reader()
    saver = manager(storage, {"reader": reader})
    saver.restore()
    next(iter(reader))
    saver.save()
    assert read_history(storage).tip.readers["reader"].state["step"] == 0


def test_a_receipt_needs_a_reader_that_can_be_told() -> None:
    two = manager(MemoryStorage(), {"a": Reader(), "b": Reader()})
    two.restore()
    receipts = [next(iter(two._objects[name])) for name in "ab"]
    with pytest.raises(ConfigError, match="2 tracked readers"):
        two.step(receipts[0])
    with pytest.raises(ConfigError, match="'c'"):
        two.step({"c": receipts[0]})
    assert two.steps_done == 0
    two.step({"a": receipts[0], "b": receipts[1]})
    none = manager(MemoryStorage(), {"n": Counter()})
    none.restore()
    with pytest.raises(ConfigError, match="no tracked reader"):
        none.step(receipts[0])


def test_the_ledger_adds_up_over_epochs_attempts_and_rewinds() -> None:
    storage = MemoryStorage()
    for attempt in range(3):
        reader = Reader(batch_size=30)
        saver = manager(storage, {"reader": reader}, persist_every=7)
        saver.restore()
        while reader.epoch < 1 + attempt:
            for _ in reader:
                saver.step()
        saver.save()
        if attempt < 2:
            batches = iter(reader)  # lost: delivered and trained on, never saved
            next(batches)
            saver.step()
    history = read_history(storage)
    total: dict[int, int] = {}
    for one in history.chain:
        for epoch, rows in one.readers["reader"].consumed().items():
            total[epoch] = total.get(epoch, 0) + rows.size
    assert total == {0: 1000, 1: 1000, 2: 1000}
    for before, after in zip(history.chain, history.chain[1:], strict=False):
        begin = after.readers["reader"].stretches[0].begin
        assert begin == before.readers["reader"].state


def test_a_save_that_failed_is_in_the_record_of_the_next() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, fail_at={("put", 1): StoreFault.ERROR})
    reader = Reader()
    saver = manager(storage, {"reader": reader}, persist_every=2)
    saver.restore()
    believing(saver)
    batches = iter(reader)
    next(batches)
    saver.step()
    next(batches)
    with pytest.warns(UserWarning, match="step 2"):
        assert saver.step() is None
    next(batches)
    saver.step()
    saver.save()
    record = read_history(inner).tip.readers["reader"]
    assert record.consumed()[0].size == 30 and record.steps.frontier(1) is not None


def test_a_failed_save_raises_by_default_and_the_next_one_succeeds() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, fail_at={("put", 1): StoreFault.ERROR})
    saver = manager(storage, {"n": Counter()})
    saver.restore()
    saver.step()
    with pytest.raises(SaveFailed, match="rank 0 could not write its part of step 1"):
        saver.save()
    assert saver.save().step == 1


@pytest.mark.parametrize("reads_back", [True, False])
def test_a_commit_whose_answer_was_lost_counts(reads_back: bool) -> None:
    """All three tries fail after they happened, and reading back does or does not work: the next save builds on it."""
    inner = MemoryStorage()
    storage = FaultyStorage(inner)
    reader = Reader()
    saver = manager(storage, {"reader": reader})
    saver.restore()
    batches = iter(reader)
    next(batches)
    saver.step()
    faults = {
        ("put_new", 2): StoreFault.LOST_ANSWER,
        ("put_new", 3): StoreFault.ERROR,
        ("put_new", 4): StoreFault.ERROR,
    }
    if not reads_back:
        read = len([call for call in storage.calls if call[0] == "read"])
        faults |= {("read", read + n): StoreFault.ERROR for n in range(1, 40)}
        faults = {key: fault for key, fault in faults.items() if key[0] == "put_new"} | {
            key: fault for key, fault in faults.items() if key[0] == "read" and key[1] > read + 2
        }
    storage._faults.update(faults)
    if reads_back:
        saver.save()
    else:
        with pytest.raises(SaveFailed, match="could not be put"):
            saver.save()
        storage._faults.clear()
    next(batches)
    saver.step()
    saver.save()
    history = read_history(inner)
    assert [one.step for one in history.chain] == [1, 2] and not history.abandoned
    assert [one.readers["reader"].consumed()[0].size for one in history.chain] == [10, 10]


def test_a_state_that_cannot_be_written_is_refused_at_the_first_save_with_its_path() -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"note": Counter([{"f": print}])})
    saver.restore()
    with pytest.raises(UnsupportedValue, match=r"note\.value\[0\]\.f"):
        saver.save()
    assert len(storage.objects) == 1


def test_restore_comes_first_and_once() -> None:
    saver = manager(MemoryStorage(), {"n": Counter()})
    for call in (saver.step, saver.save):
        with pytest.raises(ConfigError, match=r"restore\(\)"):
            call()
    saver.restore()
    with pytest.raises(ConfigError, match="already"):
        saver.restore()


@pytest.mark.parametrize(
    ("state", "options"),
    [
        ({"n": 3}, {}),
        ({"": Counter()}, {}),
        ({"a/b": Counter()}, {}),
        ({"lakeckpt.random": Counter()}, {}),
        ({"n": Counter()}, {"keep": 0}),
        ({"n": Counter()}, {"timeout_s": 0}),
        ({"n": Counter()}, {"persist_every": 0}),
        ({"n": Counter()}, {"fail_after": "an hour"}),
        ({"n": Counter()}, {"rank": 1}),
        ({"n": Counter()}, {"world_size": 2}),
        ({"n": Counter()}, {"group": object()}),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(state: dict[str, Any], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        manager(MemoryStorage(), state, **options)


def saved_place(objects: dict[str, Any]) -> MemoryStorage:
    storage = MemoryStorage()
    saver = manager(storage, objects)
    saver.restore()
    train_step(objects)
    saver.step()
    saver.save()
    return storage


def fingerprint(objects: dict[str, Any]) -> Any:
    return copy.deepcopy({name: one.state_dict() for name, one in objects.items()})


def test_a_misfit_lists_all_and_changes_nothing() -> None:
    storage = saved_place(training() | {"n": Counter(), "gone": Counter()})
    slots = list_slots(storage)
    live = training(seed=7) | {"n": Counter(5), "new": Counter()}
    live["model"] = torch.nn.Sequential(
        torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(8).double(), torch.nn.Linear(8, 1, bias=False)
    )
    live["model"].register_buffer("extra", torch.ones(1))
    before = {name: str(state) for name, state in fingerprint(live).items()}
    with pytest.raises(CheckpointMismatch) as error:
        manager(storage, live).restore()
    text = str(error.value)
    for part in (
        "'gone' is in the checkpoint",
        "'new' is among the objects",
        "0.weight is float32 [8, 8] in the checkpoint and float32 [4, 8]",
        "1.weight is float32 [8] in the checkpoint and float64 [8]",
        "2.bias is in the checkpoint and not in the module",
        "extra is missing from the checkpoint",
    ):
        assert part in text, part
    assert {name: str(state) for name, state in fingerprint(live).items()} == before
    assert list_slots(storage) == slots  # no attempt began: a job started by mistake stops nobody


def test_an_optimizer_of_another_model_is_refused() -> None:
    storage = saved_place(training())
    live = training()
    live["optimizer"] = torch.optim.AdamW([*live["model"].parameters()][:2])
    with pytest.raises(CheckpointMismatch, match=r"parameter 'model/.*' is in the checkpoint and not here"):
        manager(storage, live).restore()
    live["optimizer"] = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2)) for _ in range(6)])
    with pytest.raises(CheckpointMismatch, match="state of parameter 'optimizer/0/0' is not in the checkpoint"):
        manager(storage, live).restore()


def test_a_reader_of_another_table_refuses_and_nothing_changes() -> None:
    storage = saved_place(training() | {"n": Counter(1), "reader": Reader()})
    live = training(seed=3) | {"n": Counter(2), "reader": Reader(seed=8)}
    before = str(fingerprint(live))
    with pytest.raises(StateMismatch, match="seed"):
        manager(storage, live).restore()
    assert str(fingerprint(live)) == before
    with pytest.raises(CheckpointMismatch, match="'reader' was a tracked reader"):
        manager(storage, live | {"reader": Counter()}).restore()


def test_an_object_that_refuses_is_named_and_the_others_go_back() -> None:
    class Stubborn(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("no")

    storage = saved_place(training() | {"a": Counter(1), "b": Counter(1), "reader": Reader()})
    live = training(seed=3) | {"a": Counter(2), "b": Stubborn(2), "reader": Reader()}
    before = str(fingerprint(live))
    with pytest.raises(CheckpointMismatch, match="'b' refused"):
        manager(storage, live).restore()
    assert str(fingerprint(live)) == before


def test_an_object_that_does_not_go_back_is_named() -> None:
    class Once(Counter):
        loads = 0

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loads += 1
            if self.loads > 1:
                raise RuntimeError("only once")
            super().load_state_dict(state)

    class Stubborn(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("no")

    storage = saved_place(training() | {"a": Counter(1), "b": Counter(1), "c": Counter(1)})
    live = training() | {"a": Counter(2), "b": Once(2), "c": Stubborn(2)}
    with (
        pytest.warns(DamageWarning, match=r"'b' does not take back .*only once.*Make it anew"),
        pytest.raises(CheckpointMismatch, match="'c' refused"),
    ):
        manager(storage, live).restore()
    assert (live["a"].value, live["b"].value) == (2, 1)


def test_moments_keep_their_dtype_where_it_is_not_the_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.full((4,), 1.001)
    storage = MemoryStorage()
    saver = manager(storage, {"optimizer": optimizer})
    saver.restore()
    saver.save()
    other = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    fresh = torch.optim.SGD([other], lr=0.1, momentum=0.9)
    manager(storage, {"optimizer": fresh}).restore()
    assert torch.equal(fresh.state[other]["momentum_buffer"], torch.full((4,), 1.001))


def test_tied_weights_and_wrappers_load_into_a_bare_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    storage = MemoryStorage()
    saver = manager(storage, {"model": torch.nn.DataParallel(torch.compile(model, backend="eager"))})
    saver.restore()
    saver.save()
    (path,) = (path for path in storage.objects if path.startswith("objects/"))
    assert len(storage.objects[path]) < 300  # one weight of 64 bytes and a head
    bare = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    manager(storage, {"model": bare}).restore()
    weight = model[0].weight.cpu()  # DataParallel has put it on the first GPU, where there is one
    assert torch.equal(bare[0].weight, weight) and torch.equal(bare[1].weight, weight)


class Wrapper(torch.nn.Module):
    """It calls what it wraps ``module``, as wrappers do, and has a parameter of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.bias = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.randn(2))


@pytest.mark.parametrize("is_saved_bare", [True, False])
def test_names_that_would_collide_need_the_same_wrappers(is_saved_bare: bool) -> None:
    def made(is_bare: bool) -> torch.nn.Module:
        model = torch.nn.Sequential(Wrapper(), torch.nn.Linear(2, 1))
        return model if is_bare else torch.nn.DataParallel(torch.compile(model, backend="eager"))

    storage, saved, alike, other = MemoryStorage(), *map(made, (is_saved_bare, is_saved_bare, not is_saved_bare))
    saver = manager(storage, {"model": saved})
    saver.restore()
    saver.save()
    with pytest.raises(CheckpointMismatch, match=r"0\.module\.bias is missing from the checkpoint"):
        manager(storage, {"model": other}).restore()
    manager(storage, {"model": alike}).restore()
    for one, now in zip(saved.parameters(), alike.parameters(), strict=True):
        assert torch.equal(one, now)


def test_what_a_lying_store_lost_is_noticed_before_the_commit() -> None:
    class Lying(MemoryStorage):
        def put(self, path: str, chunks: Any) -> int:
            data = b"".join(bytes(chunk) for chunk in chunks)
            super().put(path, [data[:-1] if path.startswith("objects/") else data])
            return len(data)

    saver = manager(Lying(), training())
    saver.restore()
    with pytest.raises(SaveFailed, match="lists"):
        saver.save()
    assert saver.latest() is None


def test_an_attempt_that_is_superseded_in_the_midst_of_a_save_says_so() -> None:
    """Its successor removes the files that it has just written, as no checkpoint needs them."""
    storage = MemoryStorage()
    begun: list[str] = []

    def overtake(call: str, path: str) -> None:
        if call == "list" and path.startswith("objects/") and not begun:
            begun.append(path)
            successor = manager(storage, {"n": Counter(torch.zeros(4))}, keep=1)
            successor.restore()
            successor.step()
            successor.save()

    zombie = manager(FaultyStorage(storage, before=overtake), {"n": Counter(torch.ones(4))}, keep=1)
    zombie.restore()
    zombie.step()
    with pytest.raises(AttemptSuperseded, match="was taken by attempt 1"):
        zombie.save()
    assert begun


def test_a_superseded_attempt_cannot_commit() -> None:
    storage = MemoryStorage()
    zombie = manager(storage, {"n": Counter(1)})
    zombie.restore()
    zombie.step()
    zombie.save()
    owner = manager(storage, {"n": Counter(2)})
    assert owner.restore() == 1
    zombie.step()
    with pytest.raises(AttemptSuperseded, match="attempt 0 is superseded: slot 2 of the log was taken by attempt 2"):
        zombie.save()
    owner.step()
    owner.save()
    with pytest.raises(AttemptSuperseded):
        zombie.save()
    assert [one.attempt for one in read_history(storage).chain] == [0, 2]


@pytest.mark.parametrize(("moment", "reached"), [("put_new", 3), ("read parts/", 3), ("read objects/", 1)])
def test_a_commit_that_slips_in_before_the_claim_is_restored_instead(moment: str, reached: int) -> None:
    storage = MemoryStorage()
    old = manager(storage, {"n": Counter(1), "tensor": Counter(torch.ones(1))})
    old.restore()
    old.step()
    old.save()
    slipped = []

    def slip_in(method: str, path: str) -> None:
        if f"{method} {path}".startswith(moment) and len(slipped) < 2:
            slipped.append(path)
            old._objects["n"].value += 1
            old.step()
            with contextlib.suppress(AttemptSuperseded):  # tensors are read behind the claim
                old.save()

    fresh = Counter()
    objects = {"n": fresh, "tensor": Counter()}
    assert manager(FaultyStorage(storage, before=slip_in), objects).restore() == reached
    assert fresh.value == reached and slipped
    with pytest.raises(AttemptSuperseded):
        old.save()


def test_a_job_that_commits_faster_than_we_verify_is_shut_out() -> None:
    storage = MemoryStorage()
    old = manager(storage, {"n": Counter(1)})
    old.restore()
    old.step()
    old.save()
    commits = []

    def slip_in(method: str, path: str) -> None:
        if method == "put_new" and len(commits) < 5:
            old.step()
            old.save()
            commits.append(path)

    fresh = Counter()
    steps = manager(FaultyStorage(storage, before=slip_in), {"n": fresh}).restore()
    assert steps == 6 and len(commits) == 5
    with pytest.raises(AttemptSuperseded):
        old.save()
    history = read_history(storage)
    assert [one.slot for one in history.begins] == [0, 7] and [one.restored for one in history.restores] == [None, 6]


def test_two_attempts_that_begin_at_once_get_two_numbers_and_the_later_one_owns_the_run() -> None:
    storage = MemoryStorage()
    managers: list[CheckpointManager] = []

    def other_first(method: str, path: str) -> None:
        if method == "put_new" and not managers:
            managers.append(manager(storage, {"n": Counter()}))
            managers[0].restore()

    late = manager(FaultyStorage(storage, before=other_first), {"n": Counter()})
    late.restore()
    assert [managers[0].restore_report.attempt, late.restore_report.attempt] == [0, 1]
    with pytest.raises(AttemptSuperseded):
        managers[0].save()
    late.save()


def test_nothing_whole_is_never_taken_for_a_fresh_start() -> None:
    storage = MemoryStorage()
    saver = manager(storage, {"n": Counter()})
    saver.restore()
    saver.step()
    saver.save()
    for path in list(storage.objects):
        if path.startswith("parts/"):
            storage.objects[path] += b"?"
    with (
        pytest.warns(UserWarning, match="not whole"),
        pytest.raises(CheckpointDamaged, match="no checkpoint of this run"),
    ):
        manager(storage, {"n": Counter()}).restore()
    storage.objects["log/0000000001.lkc"] = b"?"
    with (
        pytest.warns(UserWarning, match="log/0000000001"),
        pytest.raises(CheckpointDamaged, match="starting anew would hide"),
    ):
        manager(storage, {"n": Counter()}).restore()


def test_the_intervals_of_a_manifest_are_those_of_the_reader() -> None:
    storage = MemoryStorage()
    reader = Reader(rows=45, batch_size=20)
    saver = manager(storage, {"reader": reader}, persist_every=1)
    saver.restore()
    for _ in reader:
        saver.step()
    sizes = [one.readers["reader"].consumed()[0] for one in read_history(storage).chain]
    assert Intervals.empty().union(*sizes) == Intervals.whole(45)
    assert sum(one.size for one in sizes) == 45


def test_a_commit_that_lands_late_is_adopted_and_never_taken_for_another_attempt() -> None:
    """The store says no and reads nothing back; the put lands when the next save has looked already."""

    class Slow(MemoryStorage):
        held: tuple[str, bytes] | None = None
        slow = False

        def put_new(self, path: str, data: bytes) -> None:
            if self.slow:
                self.held = (path, data)
                raise StorageError("no answer")
            if self.held is not None:
                (late, bytes_), self.held = self.held, None
                super().put_new(late, bytes_)
            super().put_new(path, data)

    storage, reader = Slow(), Reader()
    saver = manager(storage, {"reader": reader})
    saver.restore()
    batches = iter(reader)
    next(batches)
    saver.step()
    storage.slow = True
    with pytest.raises(SaveFailed, match="could not be put"):
        saver.save()
    storage.slow = False
    next(batches)
    saver.step()
    with pytest.raises(SaveFailed, match="came late: it counts"):
        saver.save()
    saver.save()
    history = read_history(storage)
    assert [one.step for one in history.chain] == [1, 2]
    assert [one.readers["reader"].consumed()[0].size for one in history.chain] == [10, 10]


def test_a_commit_of_which_only_the_answer_is_lost_counts_at_once() -> None:
    """The put happens, its answer does not come, and the store reads nothing back for a moment."""

    class Mute(MemoryStorage):
        path, left = "", 0

        def put_new(self, path: str, data: bytes) -> None:
            super().put_new(path, data)
            if path == self.path:
                raise StorageError("no answer")

        def read(self, path: str, *args: Any, **options: Any) -> bytes:
            if path == self.path and path in self.objects and self.left:
                self.left -= 1
                raise StorageError("no answer")
            return super().read(path, *args, **options)

    storage, reader = Mute(), Reader()
    saver = manager(storage, {"reader": reader})
    saver.restore()
    batches = iter(reader)
    for _ in range(2):
        next(batches)
        saver.step()
        if saver.steps_done == 2:
            storage.path, storage.left = slot_path(2), 2
        assert saver.save().step == saver.steps_done
    next(batches)
    saver.step()
    saver.save()
    history = read_history(storage)
    assert [one.step for one in history.chain] == [1, 2, 3]
    assert [one.readers["reader"].consumed()[0].size for one in history.chain] == [10, 10, 10]
    assert storage.left == 0 and verify(storage).every_damage == ()


def test_a_process_of_several_that_is_not_told_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE=4"):
        manager(MemoryStorage(), {"n": Counter()})
    manager(MemoryStorage(), {"n": Counter()}, rank=0, world_size=1).restore()


def test_what_was_delivered_before_the_run_began_is_not_of_it() -> None:
    reader = Reader()
    next(iter(reader))
    storage = MemoryStorage()
    saver = manager(storage, {"reader": reader})
    saver.restore()
    saver.step()
    saver.save()
    record = read_history(storage).tip.readers["reader"]
    assert record.consumed() == {} and record.steps.runs == ()


def test_what_was_delivered_before_a_restore_is_not_of_the_run_whatever_is_delivered_after_it() -> None:
    """A job that tries again in one process, with the same loader; and one that only looked at a batch."""
    storage, reader = MemoryStorage(), Reader(rows=120)
    for attempt, looked in enumerate([True, False, True]):
        saver = manager(storage, {"reader": reader})
        if looked:
            next(iter(reader))
            reader.load_state_dict(reader.state_dict() if attempt else Reader(rows=120).state_dict())
        assert saver.restore() == 2 * attempt
        batches = iter(reader)
        for number in range(3):  # the third one is lost
            next(batches)
            saver.step()
            if number == 1:
                saver.save()
    records = [one.readers["reader"] for one in read_history(storage).chain]
    assert [[each.consumed[0].pairs() for each in one.stretches] for one in records] == [
        [[(0, 20)]],
        [[(20, 40)]],
        [[(40, 60)]],
    ]
