"""Writes ``api.md`` beside itself from the docstrings of the public names: ``python docs/reference/generate.py``.

A test fails while the file is not what this writes.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import lakeckpt
import lakeckpt.testing
from lakeckpt import errors

TARGET = Path(__file__).with_name("api.md")


def generate() -> str:
    """Return the text of the reference."""
    parts = [
        "# Reference",
        "*Written from the docstrings by `docs/reference/generate.py`; do not edit.*",
        *(_entry(f"lakeckpt.{name}", getattr(lakeckpt, name)) for name in sorted(lakeckpt.__all__) if _shown(name)),
        "## lakeckpt.testing",
        *(
            _entry(f"lakeckpt.testing.{name}", getattr(lakeckpt.testing, name))
            for name in sorted(lakeckpt.testing.__all__)
        ),
        "## lakeckpt.errors",
        _text(errors),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(name: str) -> bool:
    return name != "errors" and not name.startswith("__")


def _entry(name: str, value: Any) -> str:
    parts = [f"## {name}{_signature(value)}", _text(value)]
    if inspect.isclass(value):
        parts += [_member(member, found) for member, found in vars(value).items() if not member.startswith("_")]
    return "\n\n".join(part for part in parts if part)


def _member(name: str, value: Any) -> str:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if not inspect.isfunction(function) or not inspect.getdoc(function):
        return ""
    signature = "" if isinstance(value, property) else _signature(function)
    return f"**`{name}{signature}`**\n\n{_text(function)}"


def _signature(value: Any) -> str:
    if not callable(value):
        return ""
    try:
        found = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r"<[^<>]*>", "…", found.replace("(self, ", "(").replace("(self)", "()"))


def _text(value: Any) -> str:
    """The docstring; indented parts that are not lists (trees, examples) as they stand."""
    text = inspect.getdoc(value) or ""
    return re.sub(r"::\n\n((?:    .*\n?|\n)+)", lambda m: ":\n\n```text\n" + textwrap.dedent(m.group(1)).rstrip() + "\n```\n", text)


if __name__ == "__main__":
    TARGET.write_text(generate(), encoding="utf-8")
