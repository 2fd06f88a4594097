"""A model of the state marks its forward and backward on the page, and copies and saves as one without marks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.faults.marks import Marks
from lakeckpt.watch.beat import Beat, Page, read_page

ROW = torch.ones(2, 4)


class Marked:
    """A model with marks, and its page."""

    def __init__(self, path: Path) -> None:
        self.beat = Beat(str(path), rank=0, world=1)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.optimizer = torch.optim.SGD(self.model.parameters())
        self.marks = Marks(self.beat, [self.model, self.optimizer, self.model[0]])

    @property
    def page(self) -> Page:
        page = read_page(self.beat.path)
        assert page is not None
        return page


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[Marked]:
    found = Marked(tmp_path / "page.beat")
    yield found
    found.marks.remove()


def test_the_page_follows_a_step(marked: Marked) -> None:
    loss = marked.model(ROW).sum()
    assert (marked.page.phase, marked.page.beats) == ("backward", 2)  # the first layer is a part of the model: no beats
    loss.backward()
    marked.optimizer.step()
    assert marked.page.phase == "optimizer"


def test_an_evaluation_does_not_look_like_training(marked: Marked) -> None:
    marked.model.eval()
    marked.model(ROW)
    marked.model.train()
    with torch.no_grad():
        marked.model(ROW)
    assert marked.page.phase == "start"


def test_copies_and_saved_models_mark_nothing(marked: Marked) -> None:
    saved = io.BytesIO()
    torch.save(marked.model, saved)
    saved.seek(0)
    average = torch.optim.swa_utils.AveragedModel(marked.model)
    average.update_parameters(marked.model)
    copies = copy.deepcopy(marked.model), pickle.loads(pickle.dumps(marked.model)), average
    for one in (*copies, torch.load(saved, weights_only=False)):
        assert torch.equal(one(ROW), marked.model(ROW))
        beats = marked.page.beats
        one(ROW)
        assert marked.page.beats == beats
    assert b"lakeckpt" not in saved.getvalue()


def test_a_model_compiles_in_one_graph(marked: Marked) -> None:
    compiled = torch.compile(marked.model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ROW), marked.model(ROW))


def test_a_sharded_model_trains_as_without_marks(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        weights, phases = [], []
        for has_marks in (False, True):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            fully_shard(model[0])
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
            beat = Beat(str(tmp_path / "page.beat"), rank=0, world=1)
            marks = Marks(beat, [model, optimizer] if has_marks else [])
            for _ in range(3):
                model(ROW).sum().backward()
                phases.append(read_page(beat.path))
                optimizer.step()
                optimizer.zero_grad()
            marks.remove()
            weights.append([one.full_tensor() for one in model.state_dict().values()])
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert [page and page.phase for page in phases] == ["start"] * 3 + ["backward"] * 3


def test_removed_marks_are_gone(marked: Marked) -> None:
    marked.marks.remove()
    marked.model(ROW)
    marked.optimizer.step()
    assert marked.page.phase == "start"


class Seen:
    """A part of the state that notes what the page says whenever it is saved."""

    def __init__(self) -> None:
        self.doing: list[str] = []
        self.page = ""

    def state_dict(self) -> dict[str, int]:
        page = read_page(self.page)
        self.doing.append("no page" if page is None else page.doing)
        return {"times": len(self.doing)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_the_page_says_that_the_manager_saves(tmp_path: Path) -> None:
    seen = Seen()
    with CheckpointManager(tmp_path / "run", {"seen": seen}, arenas=tmp_path / "arenas", capture_every=99) as manager:
        manager.restore()
        (path,) = (tmp_path / "arenas").glob("*.beat")
        seen.page, seen.doing = str(path), []
        manager.step()
        with manager.phase("evaluate"):
            manager.save()
            assert (page := read_page(str(path))) is not None and page.doing == "evaluate"
        manager.step()
    assert seen.doing == ["save", "closing"]
