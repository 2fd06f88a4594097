"""For every version of any history of a Delta table, what is delivered is what deltalake reads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.lake.formats.delta_log import Kind, adds, commit, delete_rows, upgrade
from tests.lake.formats.delta_tables import actions_of, assert_all_versions, of, write

ADDED: list[tuple[pa.DataType, Any]] = [
    (pa.float64(), 0.5),
    (pa.list_(pa.int32()), [1, None]),
    (pa.struct([("a", pa.int8()), ("b", pa.string())]), {"a": 1, "b": None}),
]


class History:
    """Operations on one table, each a version or more; deletion vectors are crafted, as deltalake writes none."""

    def __init__(self, root: Path) -> None:
        self.root, self.next, self.has_vectors = root, 0, False
        self._append()

    def _append(self, **more: Any) -> None:
        start, self.next = self.next, self.next + 6
        write(self.root, of(start, 6, **more), mode="append", partition_by=["p"], schema_mode="merge")

    def run(self, operation: str, amount: int) -> None:
        table = DeltaTable(str(self.root))
        if operation == "append":
            self._append()
        elif operation == "add column":
            kind, value = ADDED[amount % len(ADDED)]
            self._append(**{f"c{amount % len(ADDED)}": pa.array([None, *[value] * 5], kind)})
        elif operation == "delete":
            table.delete(f"id % 5 = {amount % 5}")
        elif operation == "update":
            table.update({"s": f"'{amount}'"}, predicate=f"id % 3 = {amount % 3}")
        elif operation == "merge":
            source = of(self.next - 3, 6).append_column("x", pa.array(range(6))).select(["id", "p", "s"])
            merge = table.merge(source, "t.id = u.id", source_alias="u", target_alias="t")
            merge.when_matched_update({"s": "u.s"}).when_not_matched_insert({"id": "u.id", "p": "u.p"}).execute()
        elif operation == "overwrite":
            start, self.next = self.next, self.next + 4
            ones = of(start, 4).set_column(1, "p", pa.array([1] * 4, pa.int32()))
            write(self.root, ones, mode="overwrite", predicate="p = 1", schema_mode="merge")
        elif operation == "compact":
            table.optimize.compact()
        elif operation == "z-order":
            table.optimize.z_order(["id"])
        elif operation == "checkpoint":
            table.create_checkpoint()
        elif operation == "restore" and table.version():
            table.restore(amount % table.version())
        elif operation == "delete by vectors":
            self._delete_by_vectors(amount)

    def _delete_by_vectors(self, amount: int) -> None:
        """Delete some rows of every other file by vectors, each of a kind and as many as the amount says."""
        if not self.has_vectors:
            self.has_vectors = bool(commit(self.root, [upgrade("deletionVectors")]))
        rows = {row["path"]: row["num_records"] for row in actions_of(self.root)}
        known = [path for path in sorted(adds(self.root)) if path in rows]
        lost = {
            path: {row for row in range(rows[path]) if (row * 7 + amount) % 3 == 0} for path in known[amount % 2 :: 2]
        }
        some = {path: gone for path, gone in lost.items() if gone}
        if some:
            delete_rows(self.root, some, KINDS[amount % 3])


KINDS: tuple[Kind, ...] = ("inline", "relative", "absolute")
OPERATIONS = (
    *("append", "add column", "delete", "update", "merge", "overwrite", "compact", "z-order", "checkpoint", "restore"),
    *("delete by vectors", "delete by vectors"),
)
STEPS = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9))


@settings(max_examples=examples(15))
@given(steps=st.lists(STEPS, min_size=1, max_size=7))
def test_every_version_of_any_history_is_what_deltalake_reads(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "t")
        for step in steps:
            history.run(*step)
        assert_all_versions(history.root)
