"""One word has one meaning: a name of a public class stands for one thing in the whole tree."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.layering import modules_of
from tests.test_layers import SOURCE

ALIKE = {
    "Attempt",  # the attempt of a job, and that of `lakeckpt.testing.replay`
    "CheckpointManager",  # of lakeckpt, and for Ray
    "LakeCheckpoint",  # one for each framework
}
"""Names that users know, which mean the same for several frameworks or purposes."""
STILL_DOUBLE = {"Agreement", "Begin", "Documents", "Held", "Part", "Run", "Runs"}


def test_no_two_public_classes_have_one_name() -> None:
    modules = defaultdict(list)
    for module, tree in modules_of(SOURCE).items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(module)
    found = {name: where for name, where in modules.items() if len(where) > 1}
    assert {name: where for name, where in found.items() if name not in ALIKE | STILL_DOUBLE} == {}
    assert set(found) >= ALIKE, "a name of ALIKE is not double any more: take it out"
