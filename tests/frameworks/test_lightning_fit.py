"""`LakeCheckpoint` in Lightning's own `fit`, interrupted at every kind of moment, in one process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.convert import convert_checkpoint
from lakeckpt.errors import ConfigError
from lakeckpt.integrations.lightning import LakeCheckpoint
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import write_table
from tests.frameworks.lightning_fits import ROWS, Fit, Module, fit, loader_of, times, used

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),
]  # Lightning warns of what the tests need not

ONCE = [{1: ROWS}, {1: ROWS}]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("lightning") / "table", rows=ROWS)


def proved(run: Path) -> bool:
    return audit(open_storage(str(run))).verdict == "proved"


def plateau(optimizer: Any) -> Any:
    """A scheduler whose every step counts: no loss is ever good enough."""
    made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9, factor=0.5)
    return {"scheduler": made, "monitor": "loss"}


def attempt(table: Path, run: Path, interrupt: tuple[str, int] = ("", -1)) -> Fit:
    """A `fit` with three validations in an epoch, on which a scheduler and the time to stop depend."""
    return fit(
        run,
        loader_of(table),
        interrupt=interrupt,
        module=Module(plateau),
        validation=loader_of(table, restart=True),
        callbacks=[EarlyStopping("loss", mode="max", patience=50)],
        val_check_interval=3,
    )


@pytest.fixture(scope="module")
def whole(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    return attempt(table, tmp_path_factory.mktemp("lightning") / "run")


@pytest.mark.parametrize(
    ("hook", "step"),
    [("batch end", 1), ("batch start", 5), ("validation", 3), ("validation", 9), ("epoch end", 9), ("batch start", 9)],
)
def test_a_fit_that_is_interrupted_goes_on_as_if_it_had_not_been(
    table: Path, tmp_path: Path, whole: Fit, hook: str, step: int
) -> None:
    """Rows, weights, random numbers, schedulers that look at validations, and the validations themselves."""
    first, second = attempt(table, tmp_path / "run", (hook, step)), attempt(table, tmp_path / "run")
    assert times(first, second) == ONCE and used(first, second) == used(whole)
    assert second.weights == whole.weights
    assert (second.trainer.global_step, second.trainer.current_epoch) == (18, 2)
    assert second.checkpoint.manager.steps_done == 18
    validations = first.module.validations + second.module.validations
    assert list(dict.fromkeys(validations)) == whole.module.validations and len(whole.module.validations) == 6
    assert first.module.validated + second.module.validated == len(validations) * ROWS
    assert second.trainer.early_stopping_callback.wait_count == whole.trainer.early_stopping_callback.wait_count > 1
    assert proved(tmp_path / "run")


@pytest.mark.parametrize("steps", [5, 9])
def test_max_steps_ends_and_a_longer_fit_reads_the_rest_of_the_epoch(table: Path, tmp_path: Path, steps: int) -> None:
    """An epoch has nine steps: it goes on in the middle of one, or at the start of the next."""
    whole = fit(tmp_path / "whole", loader_of(table), max_epochs=-1, max_steps=16)
    first = fit(tmp_path / "run", loader_of(table), max_epochs=-1, max_steps=steps)
    again = fit(tmp_path / "run", loader_of(table), max_epochs=-1, max_steps=steps)
    second = fit(tmp_path / "run", loader_of(table), max_epochs=-1, max_steps=16)
    assert again.batches == [] and first.checkpoint.manager.steps_done == steps
    assert used(first, second) == used(whole) and second.weights == whole.weights
    assert times(first, second)[0] == ONCE[0] and proved(tmp_path / "run")


@pytest.mark.parametrize(("step", "workers"), [(1, 0), (2, 2), (3, 0)])
def test_several_batches_are_one_step(table: Path, tmp_path: Path, step: int, workers: int) -> None:
    """Of 9 batches, steps have 4, 4 and 1. What was accumulated at the crash is read again."""
    options: dict[str, Any] = {"accumulate_grad_batches": 4}
    whole = fit(tmp_path / "whole", loader_of(table, num_workers=workers), **options)
    first = fit(tmp_path / "run", loader_of(table, num_workers=workers), interrupt=("batch start", step), **options)
    second = fit(tmp_path / "run", loader_of(table, num_workers=workers), **options)
    assert used(first, second) == used(whole) and times(first, second) == ONCE
    assert second.trainer.global_step == second.checkpoint.manager.steps_done == 6
    assert second.weights == whole.weights and proved(tmp_path / "run")


@pytest.mark.parametrize("step", [1, 8])
@pytest.mark.parametrize("options", [{"max_epochs": -1, "max_steps": 14}, {"limit_train_batches": 7}], ids=str)
def test_an_endless_loader_goes_on_behind_the_batch_that_was_fetched_ahead(
    table: Path, tmp_path: Path, options: dict[str, Any], step: int
) -> None:
    """One stream, or epochs of seven batches of it. Nine batches are once through the table."""
    whole = fit(tmp_path / "whole", loader_of(table, endless=True), **options)
    assert [row for _, _, rows in whole.batches for row in rows] == stream(table, 14)
    first = fit(tmp_path / "run", loader_of(table, endless=True), interrupt=("batch end", step), **options)
    second = fit(tmp_path / "run", loader_of(table, endless=True), **options)
    assert used(first, second) == used(whole) and second.weights == whole.weights
    assert (second.trainer.global_step, second.checkpoint.manager.steps_done) == (14, 14)
    assert proved(tmp_path / "run")


def stream(table: Path, batches: int) -> list[int]:
    every = iter(loader_of(table, endless=True))
    return [row for _ in range(batches) for row in next(every)["id"].tolist()]


@pytest.mark.parametrize(("step", "batch_size"), [(5, 4), (5, 16), (9, 4), (9, 16)])
def test_an_epoch_that_has_another_number_of_steps_is_read_to_its_end(
    table: Path, tmp_path: Path, step: int, batch_size: int
) -> None:
    """As with other ranks: the rest of the epoch is cut anew, and the epoch after it has another number of steps."""
    first = fit(tmp_path / "run", loader_of(table), interrupt=("batch start", step))
    second = fit(tmp_path / "run", loader_of(table, batch_size=batch_size), max_epochs=3)
    assert times(first, second, epochs=3) == [*ONCE, ONCE[0]] and proved(tmp_path / "run")
    rest, epoch = -(-(ROWS - step * 8) // batch_size), -(-ROWS // batch_size)
    assert second.trainer.global_step == step + rest + 2 * epoch and second.trainer.current_epoch == 3


def test_an_epoch_with_more_rows_than_the_one_before_is_read_whole(tmp_path: Path) -> None:
    """Lightning counts the steps of epochs once: the table has grown when the second one begins."""
    table = write_table(tmp_path / "table", rows=ROWS // 2)

    class Grow(pl.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            if not (tmp_path / "table" / "z.parquet").exists():
                more = write_table(tmp_path / "more", rows=ROWS // 2) / "part-00.parquet"
                more.rename(tmp_path / "table" / "z.parquet")

    loader = loader_of(table, options=lakeckpt.ReadOptions(on_new_version="next_epoch"))
    one = fit(tmp_path / "run", loader, callbacks=[Grow()])
    assert [len(rows) for epoch, _, rows in one.batches if epoch == 0] == [8, 8, 8, 6, 6]
    assert sum(len(rows) for epoch, _, rows in one.batches if epoch == 1) == ROWS // 2 + 9
    assert proved(tmp_path / "run")


# --- what else is part of the state


class TwoOptimizers(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        both = [torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in self.line.parameters()]
        return both, [torch.optim.lr_scheduler.StepLR(one, 1, 0.9) for one in both]

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            scheduler.step()


def test_manual_optimization_with_two_optimizers(table: Path, tmp_path: Path) -> None:
    """Lightning counts each optimizer's step. A batch is one step of the run."""
    whole = fit(tmp_path / "whole", loader_of(table), module=TwoOptimizers())
    first = fit(tmp_path / "run", loader_of(table), module=TwoOptimizers(), interrupt=("batch start", 10))
    second = fit(tmp_path / "run", loader_of(table), module=TwoOptimizers())
    assert used(first, second) == used(whole) and second.weights == whole.weights and times(first, second) == ONCE
    assert (second.trainer.global_step, second.checkpoint.manager.steps_done) == (36, 18)
    names = {"callbacks", "loops", "model", "optimizer_0", "optimizer_1", "reader", "scheduler_0", "scheduler_1"}
    assert set(second.checkpoint.manager._objects) == names


class OwnLoader(Module):
    """Makes its own loader, and asks for the number of steps before `fit` begins."""

    def __init__(self, table: Path) -> None:
        super().__init__()
        self.table, self.made = table, 0

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 18
        return super().configure_optimizers()

    def train_dataloader(self) -> Any:
        self.made += 1
        return loader_of(self.table)


class Data(pl.LightningDataModule):
    seen = 0

    def __init__(self, table: Path) -> None:
        super().__init__()
        self.table = table

    def train_dataloader(self) -> Any:
        return loader_of(self.table)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_module_that_makes_its_loader_makes_one(table: Path, tmp_path: Path) -> None:
    first = fit(tmp_path / "run", None, module=OwnLoader(table), interrupt=("batch start", 5))
    second = fit(tmp_path / "run", None, module=OwnLoader(table))
    assert times(first, second) == ONCE and second.batches[0][:2] == (0, 5) and second.module.made == 1


def test_the_data_module_the_scaler_and_objects_of_ones_own_are_saved(table: Path, tmp_path: Path) -> None:
    class Own:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    def attempt(interrupt: tuple[str, int]) -> tuple[Any, Own, Any]:
        own, data = Own(), Data(table)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        checkpoint = LakeCheckpoint(tmp_path / "run", state={"own": own}, persist_every=1)

        class Change(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step < 5:
                    own.value = data.seen = trainer.global_step

        fit(tmp_path / "run", data, plugins=[plugin], checkpoint=checkpoint, callbacks=[Change()], interrupt=interrupt)
        return scaler, own, data

    attempt(("batch start", 4))
    scaler, own, data = attempt(("batch start", 4))  # it goes on there, and is interrupted before it did anything
    assert (scaler.get_scale(), own.value, data.seen) == (16.0, 4, 4)


def test_captures_pass_through(table: Path, tmp_path: Path) -> None:
    def attempt(interrupt: tuple[str, int] = ("", -1)) -> Fit:
        options: dict[str, Any] = {"capture_every": 1, "arenas": tmp_path / "arenas", "keep": 2}
        return fit(
            tmp_path / "run",
            loader_of(table),
            checkpoint=LakeCheckpoint(tmp_path / "run", **options),
            interrupt=interrupt,
        )

    first, second = attempt(("batch end", 6)), attempt()
    assert second.batches[0][1] in (4, 5) and times(first, second) == ONCE and proved(tmp_path / "run")


def test_the_best_of_a_metric_is_kept(table: Path, tmp_path: Path) -> None:
    keep = lakeckpt.Keep(last=1, best=1, best_is="highest")
    checkpoint = LakeCheckpoint(tmp_path / "run", monitor="step", keep=keep, persist_every=1)

    class Log(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            module.log("step", float(-abs(trainer.global_step - 4)))

    fit(tmp_path / "run", loader_of(table), checkpoint=checkpoint, callbacks=[Log()], max_epochs=1)
    assert lakeckpt.load(tmp_path / "run", {"model": Module()}, step=4).metric == 0


def test_a_run_of_another_loops_checkpoint_begins_there(table: Path, tmp_path: Path) -> None:
    first = fit(tmp_path / "other", loader_of(table), max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "run", to="run")
    second = fit(tmp_path / "run", loader_of(table), max_epochs=1, interrupt=("batch start", 0))
    assert second.weights == first.weights and second.checkpoint.manager.steps_done == 9
    second = fit(tmp_path / "run", loader_of(table), max_epochs=1)
    assert times(second, epochs=1) == ONCE[:1] and second.checkpoint.manager.steps_done == 18


# --- beside Lightning's own checkpoints


def test_lightning_makes_no_checkpoints_of_its_own_unless_it_is_asked(table: Path, tmp_path: Path) -> None:
    one = fit(tmp_path / "run", loader_of(table), max_epochs=1)
    assert one.trainer.checkpoint_callbacks == [one.checkpoint] and not list(tmp_path.rglob("*.ckpt"))
    with pytest.raises(ValueError, match=r"ModelCheckpoint.* is not configured to save the best model"):
        one.trainer.test(ckpt_path="best", dataloaders=[])
    with pytest.raises(MisconfigurationException, match="enable_checkpointing=False"):
        pl.Trainer(callbacks=[LakeCheckpoint("run")], enable_checkpointing=False)
    export = ModelCheckpoint(tmp_path / "own", every_n_train_steps=4, save_top_k=-1, monitor="loss", save_last=True)
    more = {"callbacks": [export], "validation": loader_of(table, restart=True), "val_check_interval": 4}
    first = fit(tmp_path / "both", loader_of(table), interrupt=("batch end", 11), **more)
    second = fit(tmp_path / "both", loader_of(table), **more)
    assert list((tmp_path / "own").glob("*.ckpt")) and times(first, second) == ONCE and proved(tmp_path / "both")


def test_a_development_run_touches_nothing(table: Path, tmp_path: Path) -> None:
    one = fit(tmp_path / "run", loader_of(table), fast_dev_run=2)
    assert len(one.batches) == 2 and not (tmp_path / "run").exists() and one.checkpoint.manager is None


# --- what is refused


class Adds(Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["more"] = 1


class Iterates(Module):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


class Later(SingleDeviceStrategy):
    """Stands for a strategy that shards the state, as DeepSpeed and FSDP do."""

    restore_checkpoint_after_setup = True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loader": torch.utils.data.DataLoader([1])}, r"the training loader is <torch.*give fit a LakeLoader"),
        ({"loader": {"a": 1, "b": 2}}, "one lakeckpt.LakeLoader.*mix"),
        ({"batch_size": None}, "whose dataset has a batch_size"),
        ({"module": Adds()}, r"Adds.on_save_checkpoint adds to Lightning's checkpoints.*state=\{\}"),
        ({"module": Iterates()}, "dataloader_iter"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs makes another loader"),
        ({"callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
        ({"more": True}, "two LakeCheckpoints"),
        ({"validates": True}, r"make it LakeLoader\(…, restart=True\)"),
        ({"strategy": Later("cpu")}, "strategy='ddp'.*and this is .*Later"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_cannot_be_exact_is_refused(table: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    loader = options.pop("loader", None) or loader_of(table, batch_size=options.pop("batch_size", 8))
    validation = loader_of(table) if options.pop("validates", False) else None
    if options.pop("more", False):
        options["callbacks"] = [LakeCheckpoint(tmp_path / "other")]
    with pytest.raises(ConfigError, match=words):
        fit(tmp_path / "run", loader, validation=validation, **options)


def test_state_says_that_what_a_hook_adds_is_thought_of(table: Path, tmp_path: Path) -> None:
    checkpoint = LakeCheckpoint(tmp_path / "run", state={})
    assert len(fit(tmp_path / "run", loader_of(table), module=Adds(), checkpoint=checkpoint).batches) == 18


def test_lightnings_checkpoints_are_not_where_it_goes_on(table: Path, tmp_path: Path) -> None:
    one = fit(tmp_path / "run", loader_of(table), max_epochs=1)
    one.trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer = pl.Trainer(callbacks=[LakeCheckpoint(tmp_path / "run")], logger=False, accelerator="cpu")
    with pytest.raises(ConfigError, match=r"ckpt_path='.*last.ckpt'.*leave ckpt_path out.*--to run"):
        trainer.fit(Module(), loader_of(table), ckpt_path=tmp_path / "last.ckpt")


def test_a_loader_that_was_read_before_fit_is_refused(table: Path, tmp_path: Path) -> None:
    loader = loader_of(table)
    next(iter(loader))
    with pytest.raises(ConfigError, match=r"was read before fit.*loader.peek\(\)"):
        fit(tmp_path / "run", loader)
    looked = loader_of(table)
    looked.peek()
    assert times(fit(tmp_path / "other", looked)) == ONCE


def test_arguments_that_a_manager_does_not_have_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="persist"):
        LakeCheckpoint("run", persist=3)
    assert pickle.loads(pickle.dumps(LakeCheckpoint("run", keep=2)))._options == {"keep": 2}  # ddp_spawn does so
