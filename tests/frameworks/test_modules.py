"""The modules of `lakeckpt.integrations` keep the rules that ``tests/test_all_attributes.py`` has for all others."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.test_all_attributes import FRAMEWORKS, PATHS, tree_of, wrong_in

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]  # the frameworks' imports warn

MODULES = [name for name in PATHS if name.startswith(FRAMEWORKS) and not name.endswith("common")]


@pytest.mark.parametrize("module", MODULES)
def test_all_lists_what_the_module_defines_and_each_says_what_it_is_for(module: str) -> None:
    loaded = importlib.import_module(module)
    assert wrong_in(tree_of(module), loaded.__all__) == []
    assert all(inspect.getdoc(getattr(loaded, name)) for name in loaded.__all__)
