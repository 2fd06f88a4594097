"""A newcomer finds the way by names: one word has one meaning, and each folder opens with a drawing of its files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.layering import modules_of
from tests.test_layers import SOURCE

ALIKE = {
    "Attempt",  # the attempt of a job, and that of `lakeckpt.testing.replay`
    "CheckpointManager",  # of lakeckpt, and for Ray
    "LakeCheckpoint",  # one for each framework
}
"""Names that users know, which mean the same for several frameworks or purposes."""


def test_no_two_public_classes_have_one_name() -> None:
    modules = defaultdict(list)
    for module, tree in modules_of(SOURCE).items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(module)
    found = {name: where for name, where in modules.items() if len(where) > 1}
    assert {name: where for name, where in found.items() if name not in ALIKE} == {}
    assert set(found) >= ALIKE, "a name of ALIKE is not double any more: take it out"


FOLDERS = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
MOST_LINES = 15


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_the_drawing_of_a_folder_names_what_lies_in_it_and_nothing_else(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    _, _, drawing = text.partition("::\n\n")
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    modules |= {f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").exists()}
    if folder.name == "lakeckpt":
        modules -= {"__main__"}
    assert set(re.findall(r"\[([a-z_0-9]+/?)\]", drawing)) == modules, "draw a module as [name], a folder as [name/]"
    assert len(drawing.splitlines()) <= MOST_LINES
