"""Lines of the kernel's log join a death: those of its process or of a device, of the last seconds, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakeckpt.checkpoint.faults.notes import add_evidence, leave_note, note_at
from lakeckpt.recovery.faults import FaultNote
from lakeckpt.watch.system import kernel_log
from lakeckpt.watch.system.kernel_log import fault_lines
from tests.recovery.deaths import died

KILLED = "Out of memory: Killed process 71 (python) total-vm:1kB"
LOST = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("record", "is_found"),
    [
        (f"3,1,99000000,-;{KILLED}", True),
        (f"3,1,99000000,-;{LOST}", True),
        (f"3,1,99000000,-;{KILLED.replace('71', '72')}", False),
        (f"3,1,60000000,-;{LOST}", False),
        (f"30,1,99000000,-;{LOST}", False),  # a program wrote it, not the kernel
        ("6,1,99000000,-;eth0: Link is Up", False),
    ],
)
def test_a_line_counts_if_it_is_new_and_of_the_kernel_and_names_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, is_found: bool
) -> None:
    records = iter([record + "\n SUBSYSTEM=pci\n", ""])
    monkeypatch.setattr(kernel_log, "_next", lambda descriptor: next(records))
    (tmp_path / "kmsg").touch()
    found = fault_lines(71, str(tmp_path / "kmsg"), now_s=100.0)
    assert found == ((record.partition(";")[2],) if is_found else ())


def test_a_log_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert fault_lines(71, str(tmp_path / "none")) is None
    (tmp_path / "kmsg").write_text("other words\n")
    assert fault_lines(71, str(tmp_path / "kmsg")) is None


@pytest.mark.parametrize(
    ("note", "line", "because"),
    [
        (died(what="SIGKILL", text="seen"), KILLED, "host memory"),
        (died(cause="unknown", what="", text="seen"), LOST, "device lost"),
        (died(what="RuntimeError", text="[gloo] Connection closed by peer"), LOST, "device lost"),
        (died(what="KeyError", text="'loss'"), LOST, "code"),
        (died(what="ModuleNotFoundError", text="No module named 'x'"), LOST, "library missing"),
    ],
)
def test_evidence_of_the_kernel_explains_what_the_script_cannot_have_done(
    tmp_path: Path, note: FaultNote, line: str, because: str
) -> None:
    page = str(tmp_path / "0.beat")
    leave_note(page, note)
    found = add_evidence(page, note, [line])
    assert found.because == because and found == note_at(page)
    assert (line in found.text) == (because not in ("code", "library missing"))
    assert add_evidence(page, note, []) == note
