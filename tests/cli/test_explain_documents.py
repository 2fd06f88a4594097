"""`lakeckpt explain --table` names the documents of packed sequences, as they were delivered."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, ReadOptions, mix, open_table, pack
from tests.checkpoint.scripts import Script

Ask = Callable[..., tuple[int, Any]]
Show = Callable[..., tuple[int, str]]
Delivered = dict[int, list[list[tuple[int, list[int]]]]]
"""optimizer step → per rank → (number of the sequence, its tokens)."""

LENGTH = 8
BEFORE, AFTER = (1001,), (1002, 1003)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of unique tokens: 8 row groups in two files."""
    folder, count = tmp_path_factory.mktemp("texts"), itertools.count()
    for number, lengths in enumerate([[3, 0, 40, 1, 7] * 4, [9, 25, 0, 5, 12] * 3]):
        lists = [list(itertools.islice(count, length)) for length in lengths]
        table = pa.table({"words": pa.array(lists, pa.list_(pa.int32()))})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=4)
    return folder


def delivered(texts: Path, run: Path, *, attempts: tuple[tuple[int, int], ...], **options: Any) -> Delivered:
    """Train in ``run`` for attempts of (ranks, steps); return what the ranks got in each step."""
    found: Delivered = {}
    for ranks, steps in attempts:
        loaders = [loader_of(texts, rank, ranks, **options) for rank in range(ranks)]
        # ranks of one process: a model in train() mode would be warned of the loaders of other ranks
        state = {"model": torch.nn.Linear(1, 1).eval(), "reader": loaders[0]}
        with CheckpointManager(run, state, persist_every=3) as manager:
            done = manager.restore()
            plain = loaders[0].state_dict()
            for loader in loaders[1:]:
                loader.load_state_dict(plain)
            for step, batches in enumerate(itertools.islice(zip(*loaders, strict=True), steps), done + 1):
                found[step] = [sequences_of(batch) for batch in batches]
                manager.step(batches[0])
    return found


def loader_of(texts: Path, rank: int, ranks: int, **options: Any) -> LakeLoader:
    added = options.pop("added", {})
    lanes = ReadOptions(num_lanes=ranks)
    settings = {"batch_size": 2, "shuffle": True, "shuffle_window": 2, "seed": 3, "options": lanes, **options}
    dataset = LakeDataset(open_table(texts), rank=rank, world_size=ranks, **settings)
    return LakeLoader(pack(dataset, length=LENGTH, column="words", **added))


def sequences_of(batch: Any) -> list[tuple[int, list[int]]]:
    numbers = [number for span in batch.receipt.spans for number in range(span.start, span.stop)]
    return [
        (number, tokens[mask].tolist())
        for number, tokens, mask in zip(numbers, batch["tokens"], batch["loss_mask"], strict=True)
    ]


def explained(texts: Path, rank: Any, *, added: bool) -> list[tuple[int, list[int]]]:
    """Return the sequences of a rank, made of the documents that were named, as the table has them."""
    found: list[tuple[int, list[int]]] = []
    for one in rank["documents"]:
        file = pq.ParquetFile(texts / one["file"])
        document = file.read_row_group(one["row_group"])["words"][one["row"]].as_py()
        whole = [*BEFORE, *document, *AFTER] if added else document
        tokens = whole[one["start"] : one["stop"]]
        assert len(tokens) == one["stop"] - one["start"]
        if found and found[-1][0] == one["sequence"]:
            found[-1][1].extend(tokens)
        else:
            found.append((one["sequence"], tokens))
    return found


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an epoch": ({}, []),
    "tokens beside documents": (
        {"added": {"before": BEFORE, "after": AFTER}},
        ["--before", "1001", "--after", "1002,1003"],
    ),
    "over epoch borders": ({"endless": True}, []),
    "rows that do not count": ({"consumed": {"0.parquet": [(0, 3), (6, 9)], "1.parquet": [(4, 6)]}}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_every_step_is_explained_by_the_documents_that_were_delivered(
    case: str, texts: Path, tmp_path: Path, ask: Ask
) -> None:
    options, words = CASES[case]
    book = delivered(texts, tmp_path / "run", attempts=((1, 5), (2, 4), (1, 12)), **options)
    assert len(book) >= 12
    for step, ranks in book.items():
        status, plain = ask("explain", tmp_path / "run", "--step", step, "--table", texts, "--column", "words", *words)
        assert status == 0
        (reader,) = plain["readers"]
        assert [explained(texts, rank, added=bool(words)) for rank in reader["ranks"]] == ranks, f"step {step}"


def test_documents_are_listed_in_the_order_of_delivery(texts: Path, tmp_path: Path, show: Show) -> None:
    book = delivered(texts, tmp_path / "run", attempts=((2, 3),))
    status, told = show("explain", tmp_path / "run", "--step", 2, "--table", texts, "--column", "words", "--rank", 1)
    lines = told.splitlines()
    assert status == 0
    assert lines[3].split() == ["rank", "epoch", "sequence", "file", "row", "group", "row", "tokens"]
    assert list(dict.fromkeys(int(line.split()[2]) for line in lines[4:])) == [number for number, _ in book[2][1]]


def test_the_version_that_the_run_pinned_is_read_where_the_table_has_grown(
    texts: Path, tmp_path: Path, ask: Ask
) -> None:
    grown = Path(shutil.copytree(texts, tmp_path / "texts"))
    book = delivered(grown, tmp_path / "run", attempts=((1, 4),))
    shutil.copy(grown / "0.parquet", grown / "2.parquet")
    _, plain = ask("explain", tmp_path / "run", "--step", 3, "--table", grown, "--column", "words")
    assert explained(texts, plain["readers"][0]["ranks"][0], added=False) == book[3][0]


def test_what_cannot_be_named_is_refused_by_name(texts: Path, tmp_path: Path, show: Show) -> None:
    delivered(texts, tmp_path / "run", attempts=((1, 4),))
    words = ["explain", tmp_path / "run", "--step", 2]
    given = [*words, "--table", texts]

    def refused(*told: object) -> str:
        status, text = show(*told)
        assert status == 2
        return text

    assert "sequences of 8 tokens of 'words', and not with column 'tokens'" in refused(*given)
    assert "give --column, --before and --after" in refused(*given, "--column", "words", "--after", "1")
    assert "--after takes tokens with commas between them, such as 1,2, got 'end'" in refused(*given, "--after", "end")
    assert "Give --table instead of --rows" in refused(*words, "--rows")
    pq.write_table(pa.table({"words": pa.array([[1]], pa.list_(pa.int32()))}), tmp_path / "other.parquet")
    assert "0.parquet" in refused(*words, "--table", tmp_path / "other.parquet", "--column", "words")


def test_documents_of_filtered_rows_are_refused(texts: Path, tmp_path: Path, show: Show) -> None:
    keep = pc.list_value_length(pc.field("words")) > 5
    delivered(texts, tmp_path / "run", attempts=((1, 3),), filters=keep)
    status, told = show("explain", tmp_path / "run", "--step", 1, "--table", texts, "--column", "words")
    assert status == 2
    assert "which rows the filter keeps is known to the script" in told


def test_a_table_is_refused_where_rows_were_read(good_run: Script, lake: Path, show: Show) -> None:
    del good_run
    status, told = show("explain", lake.parent / "good", "--step", 3, "--table", lake)
    assert status == 2
    assert "this run reads rows: leave it out" in told


def test_the_table_is_of_one_source_of_a_mixture(texts: Path, tmp_path: Path, ask: Ask, show: Show) -> None:
    other = Path(shutil.copytree(texts, tmp_path / "other"))
    (other / "1.parquet").unlink()
    sources = {
        name: (pack(LakeDataset(place, batch_size=4, shuffle=True), length=LENGTH, column="words"), 0.5)
        for name, place in (("a", texts), ("b", other))
    }
    loader = LakeLoader(mix(sources, source_column="source"))
    with CheckpointManager(tmp_path / "run", {"model": torch.nn.Linear(1, 1), "reader": loader}) as manager:
        manager.restore()
        for batch in itertools.islice(loader, 3):
            manager.step(batch)
    mine = batch["source"] == batch["source"].max()
    given = ["explain", tmp_path / "run", "--step", 3, "--table", other, "--column", "words"]
    _, plain = ask(*given, "--reader", "reader.b")
    ranks = {reader["reader"]: reader["ranks"][0] for reader in plain["readers"]}
    assert "documents" not in ranks["reader.a"]
    found = [tokens for _, tokens in explained(other, ranks["reader.b"], added=False)]
    assert found == batch["tokens"][mine].tolist()
    status, told = show(*given)
    assert status == 2 and "and there are several: reader.a, reader.b" in told
    status, told = show(*given, "--reader", "reader")
    assert status == 2 and "and there is no 'reader': reader.a, reader.b" in told
