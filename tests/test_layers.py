"""The layers of the design hold; and the checker that says so can say otherwise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lakeckpt
from tests.layering import NEVER_LOADS_TORCH, circle, modules_of, violations
from tests.patience import PATIENCE_S

SOURCE = Path(lakeckpt.__file__).parents[1]
PUBLIC = {"open_table": "lakeckpt.lake.formats.dispatch", "LakeLoader": "lakeckpt.data.loader"}


def test_imports_run_downward_only_and_torch_stays_where_it_belongs() -> None:
    assert violations(SOURCE, lakeckpt._PUBLIC) == []


def test_no_module_imports_itself_through_others() -> None:
    assert circle(SOURCE, lakeckpt._PUBLIC) == []


def test_the_layers_below_and_the_commit_path_load_without_torch() -> None:
    modules = [
        "lakeckpt",
        "lakeckpt.errors",
        "lakeckpt.lake.table.table",
        "lakeckpt.reading.windows.positions",
        *NEVER_LOADS_TORCH,
    ]
    script = f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr


def test_the_walk_reaches_every_module() -> None:
    assert len(modules_of(SOURCE)) == len(list(SOURCE.rglob("*.py")))


def tree(root: Path, **sources: str) -> Path:
    """A package of the same name, with the given sources; ``__`` in a name separates folders."""
    for name, source in {"__init__": "", **sources}.items():
        path = root / "lakeckpt" / f"{name.replace('__', '/') if name != '__init__' else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    for folder in (root / "lakeckpt").rglob("*"):
        if folder.is_dir():
            (folder / "__init__.py").touch()
    return root


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core__order", "import numpy as np\nimport math\nfrom lakeckpt.errors import StateError\n"),
        ("core__order", "from lakeckpt.core import hashing\nfrom . import hashing\nfrom .hashing import x\n"),
        ("lake__table", "import pyarrow.parquet as pq\nfrom lakeckpt.wire.envelope import dumps\n"),
        ("data__loader", "import torch\nfrom lakeckpt import __version__, open_table\n"),
        ("data__workers__pool", "from lakeckpt.data.base import options\nfrom lakeckpt.data.workers import slots\n"),
        ("checkpoint__manager", "import torch.distributed\nfrom lakeckpt.tracking.tally import Tally\n"),
        ("checkpoint__persist__log", "def later():\n    import torch\n"),
        ("checkpoint__persist__log", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"),
        ("cli__main", "import importlib\nimport lakeckpt\nimportlib.import_module(f'lakeckpt.cli.{1}')\n"),
        ("testing__lazy", "import importlib\nT = {'a': 'lakeckpt.data.loader'}\nimportlib.import_module(T['a'])"),
        ("integrations__x", "from lakeckpt import LakeLoader\nimport lightning\n"),
        ("lake__formats__delta_log", "import deltalake\nfrom lakeckpt.lake.formats import delta_files\n"),
        ("lake__formats__pinned", "def pin():\n    from lakeckpt.lake.formats import hudi\n"),
    ],
)
def test_imports_downward_pass(tmp_path: Path, module: str, source: str) -> None:
    root = tree(tmp_path, **{"core__hashing": "", "data__loader": "", module: source})
    assert violations(root, PUBLIC) == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("core__order", "import pyarrow", "neither the standard library"),
        ("core__order", "import torch", "without torch"),
        ("lake__table", "import deltalake", "neither the standard library"),
        ("lake__formats__hudi", "import deltalake", "neither the standard library"),
        ("lake__formats__pinned", "from lakeckpt.lake.formats import hudi", "and its library"),
        ("lake__table", "from lakeckpt.lake.formats.iceberg.snapshot import pin", "and its library"),
        ("wire__codec", "from lakeckpt.core.hashing import x", "not below it"),
        ("core__order", "from lakeckpt import lake", "whole package|not below it"),
        ("core__order", "from lakeckpt import LakeLoader", r"core imports lakeckpt\.data\.loader"),
        ("core__order", "from ..lake import table", "not below it"),
        ("core__order", "from ..lake.table import x", "not below it"),
        ("core__order", "def f():\n    def g():\n        from lakeckpt.lake import table", "not below it"),
        ("core__order", "class A:\n    def f(self):\n        import torch.nn", "without torch"),
        ("core__order", "if TYPE_CHECKING:\n    from lakeckpt.lake.table.table import Table", "not below it"),
        ("core__order", "try:\n    import lakeckpt.data.loader\nexcept ImportError: pass", "not below it"),
        ("core__order", "import importlib\nx = importlib.import_module('lakeckpt.data.loader')", "not below it"),
        ("core__order", "from importlib import import_module as _\nimport_module('torch')", "without torch"),
        ("core__order", "__import__('torch')", "without torch"),
        ("core__order", "f = lambda: __import__('pyarrow')", "neither the standard library"),
        ("core__order", "import importlib\nimportlib.import_module('lakeckpt.' + 'data')", "computed"),
        ("core__order", "T = {'a': 'lakeckpt.data.loader'}\n__import__(T['a'])", "not below it"),
        ("core__order", "T = {'a': 'torch.nn'}\n__import__(T['a'])", "without torch"),
        ("core__order", "import lakeckpt\nlakeckpt.open_table('x')", "whole package"),
        ("errors", "from lakeckpt.core import order", "not below it"),
        ("wire__codec", "import pyarrow", "neither the standard library"),
        ("lake__table", "import torch", "without torch"),
        ("lake__table", "from lakeckpt.reading import decode", "not below it"),
        ("reading__decode", "from torch import Tensor", "without torch"),
        ("data__loader", "from lakeckpt.checkpoint import log", "not below it"),
        ("data__base__source", "from lakeckpt.data.position.progress import Progress", "a later stage"),
        ("data__workers__pool", "if TYPE_CHECKING:\n    from lakeckpt.data.dataset import dataset", "a later stage"),
        ("data__counting", "import math", "in no stage of data: base, position, flows"),
        ("tracking__tally", "from lakeckpt.checkpoint import log", "not below it"),
        ("watch__x", "import torch", "without torch"),
        ("watch__x", "from lakeckpt.recovery import y", "not below it"),
        ("testing__x", "from lakeckpt.cli import main", "not below it"),
        ("extras__x", "import math", "not one that the design names"),
        ("checkpoint__persist__log", "import torch", r"lakeckpt\.checkpoint\.persist\.log loads torch"),
        ("checkpoint__persist__log", "from lakeckpt.data import loader", "loads torch: .*data.loader > torch"),
        ("checkpoint__persist__log", "import lakeckpt.data.loader as l", "loads torch: .*data.loader > torch"),
        ("checkpoint____init__", "import torch", r"lakeckpt\.checkpoint\.persist\.log loads torch"),
    ],
)
def test_imports_upward_sideways_or_of_torch_are_found(tmp_path: Path, module: str, source: str, wrong: str) -> None:
    sources = dict.fromkeys(("core__hashing", "wire__codec", "lake__table", "reading__decode", "cli__main"), "")
    sources |= {"lake__formats__hudi": "", "lake__formats__iceberg__snapshot": ""}
    sources |= {"data__loader": "import torch", "checkpoint__persist__log": "", "recovery__y": "", module: source}
    root = tree(tmp_path, **sources)
    if module.endswith("__init__"):
        (root / "lakeckpt" / "checkpoint" / "__init__.py").write_text(source)
    found = violations(root, PUBLIC)
    assert re.search(wrong, "\n".join(found)), found


@pytest.mark.parametrize(
    "source",
    [
        "from lakeckpt.data.flows.feed import Feed",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lakeckpt.data.flows.feed import Feed",
        "class A:\n    def f(self):\n        from ..data.flows import feed",
        "import importlib\nx = importlib.import_module('lakeckpt.data.flows.feed')",
    ],
)
def test_a_circle_is_found_wherever_its_imports_stand(tmp_path: Path, source: str) -> None:
    uses = {
        "data__flows__feed": "from lakeckpt.data import loader",
        "data__loader": "from lakeckpt.data import options",
    }
    assert circle(tree(tmp_path, data__options="", **uses), PUBLIC) == []
    (tmp_path / "lakeckpt" / "data" / "options.py").write_text(source)
    found = circle(tmp_path, PUBLIC)
    assert found[0] == found[-1]
    assert {f"lakeckpt.data.{name}" for name in ("options", "loader", "flows.feed")} == set(found)
