"""The table of explicit faults is examined by lists that were made without sight of it; -s prints the figures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from lakeckpt.watch.system.explicit import Explicit, fault_table

HERE = Path(__file__).parent
LEAST, OF = 0.95, 150


def asked(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text("utf-8"))


def answer(fault: dict[str, Any]) -> Explicit | None:
    text = f"Xid {fault['xid']}" if "xid" in fault else fault.get("text", "")
    return fault_table().explain(text, exit=fault.get("exit"), signal=fault.get("signal", ""))


def test_explicit_faults_of_the_list_get_the_right_cause_and_ordinary_lines_get_none() -> None:
    faults = asked("explicit_faults.toml")["fault"]
    wrong = [(one, found) for one in faults if (found := answer(one)) is None or found.cause != one["cause"]]
    roles = sum((found := answer(one)) is not None and found.role == one["role"] for one in faults)
    lines = asked("ordinary_lines.toml")["lines"]
    alarms = [(line, found) for line in lines if (found := fault_table().explain(line))]
    print(f"\nright cause: {len(faults) - len(wrong)} of {len(faults)}; right role: {roles}")
    print(f"ordinary lines taken for faults: {len(alarms)} of {len(lines)}")
    assert len(faults) == OF and len(faults) - len(wrong) >= LEAST * OF, [
        (one["cause"], found and (found.id, found.cause), str(one.get("text", one))[:400]) for one, found in wrong
    ]
    assert not alarms, [(found.id, line) for line, found in alarms]
