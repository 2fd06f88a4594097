"""``__all__`` of every public module is what the module defines, and the top-level package loads lazily."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lakeckpt
from tests.layering import paths_of
from tests.patience import PATIENCE_S

SOURCE = Path(lakeckpt.__file__).parents[1]
PATHS = paths_of(SOURCE)
FRAMEWORKS = "lakeckpt.integrations."  # tests/frameworks has the same tests for them
PUBLIC_MODULES = [
    name
    for name in PATHS
    if not any(part.startswith("_") for part in name.split("."))
    and (not name.startswith(FRAMEWORKS) or name == f"{FRAMEWORKS}common")
]


def tree_of(module: str) -> ast.Module:
    return ast.parse(PATHS[module].read_text("utf-8"))


def wrong_in(tree: ast.Module, listed: list[str] | None) -> list[str]:
    """What ``__all__`` says too little or twice: public classes and functions are listed, constants may be."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    defined = {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}
    if listed is None:
        return [f"no __all__, and it defines {sorted(defined)}"] if defined else []
    wrong = [f"defines {name}, which __all__ does not list" for name in sorted(defined - set(listed))]
    return wrong + [f"__all__ lists {name} twice" for name in sorted(set(listed)) if listed.count(name) > 1]


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_all_lists_what_the_module_defines(module: str) -> None:
    loaded = importlib.import_module(module)
    listed = getattr(loaded, "__all__", None)
    assert wrong_in(tree_of(module), listed) == []
    missing = [name for name in listed or [] if not hasattr(loaded, name)]
    assert missing == []


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_module_and_public_name_says_what_it_is_for(module: str) -> None:
    loaded = importlib.import_module(module)
    assert ast.get_docstring(tree_of(module)), f"{module} has no docstring"
    for name in getattr(loaded, "__all__", []):
        value = getattr(loaded, name)
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module:
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"


@pytest.mark.parametrize(
    ("source", "listed"),
    [
        ("def f(): ...", None),
        ("def f(): ...", []),
        ("class A: ...\nclass B: ...", ["A"]),
        ("async def f(): ...", ["g"]),
        ("def f(): ...", ["f", "f"]),
    ],
)
def test_a_list_that_does_not_fit_is_noticed(source: str, listed: list[str] | None) -> None:
    assert wrong_in(ast.parse(source), listed)


@pytest.mark.parametrize(
    ("source", "listed"),
    [("def _f(): ...", None), ("import os\nLIMIT = 3", []), ("def f(): ...\nLIMIT = 3", ["f", "LIMIT"]), ("", None)],
)
def test_a_list_that_fits_passes(source: str, listed: list[str] | None) -> None:
    assert wrong_in(ast.parse(source), listed) == []


def test_every_public_name_of_the_package_can_be_had() -> None:
    for name in lakeckpt.__all__:
        assert getattr(lakeckpt, name) is not None
    assert set(lakeckpt.__all__) == {*lakeckpt._PUBLIC, "__version__"}
    assert set(lakeckpt.__all__) <= set(dir(lakeckpt))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lakeckpt.nothing


def test_importing_the_package_loads_neither_torch_nor_pyarrow() -> None:
    script = "import sys, lakeckpt; print(sorted({'torch', 'pyarrow', 'numpy', 's3fs', 'rich'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ran.stdout.strip() == "[]"
