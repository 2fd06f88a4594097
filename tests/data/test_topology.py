"""Which rank reads what: arguments first, then the group, then torch.distributed; and never a guess."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from lakeckpt import LakeDataset, LakeLoader
from lakeckpt.errors import ConfigError
from tests.data.reading import ROWS, flat
from tests.patience import PATIENCE_S


def test_several_processes_without_a_group_or_a_rank_are_refused(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for call in (iter, len, lambda loader: loader.state_dict()):
        with pytest.raises(ConfigError, match=r"WORLD_SIZE=4.*init_process_group.*dp_group"):
            call(LakeLoader(LakeDataset(lake, batch_size=4)))
        with pytest.raises(ConfigError, match="WORLD_SIZE=4"):
            call(LakeDataset(lake, batch_size=4))
    with pytest.raises(ConfigError, match="WORLD_SIZE=4"):
        pickle.dumps(LakeDataset(lake, batch_size=4))
    explicit = LakeLoader(LakeDataset(lake, batch_size=4, rank=0, world_size=1))
    assert sorted(flat(explicit)) == list(range(ROWS))


@pytest.mark.parametrize("alone", ["1", ""])
def test_one_process_needs_no_group(lake: Path, monkeypatch: pytest.MonkeyPatch, alone: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", alone)
    assert LakeDataset(lake, batch_size=4).topology == (0, 1)


SCRIPT = """
import json, os, pickle, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from lakeckpt import LakeDataset, LakeLoader
from lakeckpt.errors import ConfigError

if __name__ == "__main__":
    rank, lake, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ["WORLD_SIZE"] = "2"
    dataset = LakeDataset(lake, batch_size=4, shuffle=True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    of_rank_1 = dist.new_group([1])
    for group, message in [
        (5, "ProcessGroup or a one-dimensional DeviceMesh"),
        (init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), "of a larger one"),
        *([] if rank else [(of_rank_1, "not in the group")]),
    ]:
        try:
            LakeDataset(lake, batch_size=4, dp_group=group).topology
        except ConfigError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    found = {}

    def rows(loader):
        return [row for batch in loader for row in batch["id"].tolist()]

    found["the default group"] = rows(LakeLoader(dataset, num_workers=1))
    found["a mesh"] = rows(LakeLoader(LakeDataset(lake, batch_size=4, dp_group=mesh["dp"])))
    grouped = LakeDataset(lake, batch_size=4, dp_group=alone)
    found["a group of one"] = rows(grouped)
    assert grouped.topology == (0, 1)
    spawned = DataLoader(grouped, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    found["a group of one, spawned"] = rows(spawned)
    found["a plain loader"] = rows(DataLoader(LakeDataset(lake, batch_size=4), batch_size=None, num_workers=2))
    copied = pickle.loads(pickle.dumps(LakeDataset(lake, batch_size=4, dp_group=alone)))
    assert copied.topology == (0, 1)
    explicit = LakeDataset(lake, batch_size=4, rank=1 - rank, world_size=2)
    assert explicit.topology == (1 - rank, 2)
    states = [None, None]
    loader = LakeLoader(LakeDataset(lake, batch_size=4))
    next(iter(loader))
    dist.all_gather_object(states, loader.state_dict())
    assert states[0] == states[1]
    dist.destroy_process_group()
    print(json.dumps(found))
"""


@pytest.mark.soak
def test_the_group_or_mesh_says_which_rank_this_is_in_workers_too(lake: Path, tmp_path: Path) -> None:
    import json

    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(lake), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [one.communicate(timeout=PATIENCE_S) for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], ended
    first, second = (json.loads(out) for out, _ in ended)
    for name in first:
        both = first[name] + second[name]
        times = 2 if "of one" in name else 1
        assert sorted(both) == sorted(times * list(range(ROWS))), name
