"""A fault that names itself is explained by a row of the table; texts that no row knows are counted alike."""

from __future__ import annotations

import signal
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lakeckpt.errors import ConfigError
from lakeckpt.recovery.faults import explained
from lakeckpt.watch.system.explicit import fault_table, normalized, text_id
from tests.recovery.deaths import died

CAUSES = frozenset(
    """device memory, host memory, device lost, device memory error, device illegal access, device assert, nvlink,
    network card, network, collective timeout, peer gone, collective mismatch, rendezvous, name lookup, address in use,
    credentials, storage away, storage denied, storage full, file missing, file damaged, file handles, shared memory,
    threads limit, library missing, driver mismatch, version mismatch, checkpoint mismatch, not a number, code, data,
    segmentation fault, abort, killed by a signal, preempted, time limit, thermal, power, clock, cpu machine check,
    disk error, launcher, compiler, configuration""".replace("\n   ", "").split(", ")
)
FOLLOWS = frozenset(["collective timeout", "peer gone", "launcher"])
OWN = """
[[fault]]
id = "full-scratch"
match.text = ['scratch quota']
match.exit = [42]
role = "root"
cause = "storage full"
remedy = "Ask for room."
restart = "stop"
"""


def rows() -> list[dict[str, Any]]:
    text = resources.files("lakeckpt.watch.system").joinpath("faults.toml").read_text("utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)["fault"]
    return found


def test_each_row_has_a_cause_a_remedy_of_one_sentence_and_a_source() -> None:
    found = rows()
    assert len({one["id"] for one in found}) == len(found) >= 60
    assert {one["cause"] for one in found} == CAUSES
    for one in found:
        assert one["remedy"].endswith(".") and one["remedy"].count(". ") == 0 and one["source"], one["id"]
        assert (one["cause"] in FOLLOWS) <= (one["role"] == "cascade"), one["id"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM])
def test_a_signal_is_known_by_its_name_by_a_status_and_by_the_texts_of_launchers(number: signal.Signals) -> None:
    table = fault_table()
    known = table.explain(signal=number.name)
    assert known is not None
    assert known == table.explain(exit=-number) == table.explain(exit=128 + number)
    for text in (
        f"process 0 terminated with signal {number.name}",
        f"worker 3 exited with exit code {-number}",
        f"task 7 ended: exit status {128 + number}",
        f"Signal {number.value} ({number.name}) received by PID 71",
    ):
        assert table.explain(text) == known, text


def test_a_line_that_informs_or_goes_on_is_no_fault_but_the_text_of_a_death_is() -> None:
    text = "ConnectionResetError: [Errno 104] Connection reset by peer; retrying"
    assert fault_table().explain(text) is None
    found = fault_table().explain(text, died=True)
    assert found is not None and (found.cause, found.role) == ("peer gone", "cascade")
    assert fault_table().explain("12:00:01 INFO s3: connection closed by peer") is None


def test_rows_of_a_user_come_first(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    table = fault_table(str(tmp_path / "own.toml"))
    for found in (table.explain("OSError: scratch quota: [Errno 122] Disk quota exceeded"), table.explain(exit=42)):
        assert found is not None and found.id == "full-scratch"
    note = explained(died(cause="exit", what="status 42"), table)
    assert note.because == "storage full" and explained(note).because == "exit"
    assert table.explain(exit=-9) == fault_table().explain(exit=-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[[fault]]", "[[fault"),
        ("[[fault]]", "[fault]"),
        ("match.text = ['scratch quota']", "match.text = ['(']"),
        ("match.exit", "match.exits"),
        ('"root"', '"leaf"'),
        ('"stop"', '"never"'),
        ('cause = "storage full"\n', ""),
    ],
)
def test_rows_that_cannot_be_used_are_refused_with_the_file_and_the_reason(
    tmp_path: Path, before: str, after: str
) -> None:
    assert before in OWN
    path = tmp_path / "own.toml"
    path.write_text(OWN.replace(before, after))
    with pytest.raises(ConfigError, match=r"own\.toml has a row that cannot be used"):
        fault_table(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        fault_table(str(tmp_path / "none.toml"))


def test_texts_that_differ_by_what_varies_have_one_id() -> None:
    texts = (
        "2026-01-02 03:04:05.123 rank 3: /data/a/part-07.parquet at 10.0.0.7:4443 failed after 12.5 s (0x7f3a)",
        "2025-12-31T23:59:59Z rank 17: /mnt/x.parquet at 192.168.1.1:80 failed after 1e-3 s (0xdeadbeef00)",
    )
    assert len({text_id(normalized(text)) for text in texts}) == 1
    assert normalized("node gpu-node-17.cluster.local:29500 has 3 faults") == "node <host> has <n> faults"
    assert text_id(normalized("a lost page")) != text_id(normalized("a lost row"))
