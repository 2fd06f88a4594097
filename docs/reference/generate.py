"""Writes ``api.md`` and ``faults.md`` beside itself, from the docstrings of the public names and from the table of
explicit faults: ``python docs/reference/generate.py``.

A test fails while a file is not what this writes.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import lakeckpt
import lakeckpt.bubbles
import lakeckpt.convert
import lakeckpt.dcp
import lakeckpt.metrics
import lakeckpt.testing
from lakeckpt import errors
from lakeckpt.watch.system.explicit import fault_table

TARGET, FAULTS = Path(__file__).with_name("api.md"), Path(__file__).with_name("faults.md")
TASKS = {
    "Read a table": ["open_table", "Table"],
    "Make a loader": [
        "LakeDataset",
        "LakeLoader",
        "ReadOptions",
        "Follow",
        "TransformContext",
        "mix",
        "pack",
        "prefetch",
    ],
    "Use a batch": ["Batch", "MixedReceipt", "Ragged", "Receipt", "cumulative_lengths", "merge_states"],
    "Save and restore": [
        "CheckpointManager",
        "SaveHandle",
        "CheckpointInfo",
        "RestoreReport",
        "Keep",
        "Backup",
        "load",
    ],
    "Warnings": ["ReadAheadWarning", "ConsumptionWarning"],
}
"""Task → the public names of the package that serve it."""


def generate() -> str:
    """Return the text of the reference. Each public name belongs to one task."""
    listed = sorted(name for names in TASKS.values() for name in names)
    shown = sorted(name for name in lakeckpt.__all__ if name != "errors" and not name.startswith("__"))
    if listed != shown:
        raise SystemExit(f"TASKS must name each public name once; they differ in {set(listed) ^ set(shown)}")
    parts = [
        "# Reference",
        "*Written from the docstrings by `docs/reference/generate.py`; do not edit.*",
        *(part for task, names in TASKS.items() for part in _task(task, names)),
        *_module("lakeckpt.bubbles", lakeckpt.bubbles),
        *_module("lakeckpt.dcp", lakeckpt.dcp),
        *_module("lakeckpt.convert", lakeckpt.convert),
        *_module("lakeckpt.metrics", lakeckpt.metrics),
        *_integrations(),
        *_module("lakeckpt.testing", lakeckpt.testing),
        "## lakeckpt.errors",
        _text(errors),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _task(task: str, names: list[str]) -> list[str]:
    return [f"## {task}", *(_entry(f"lakeckpt.{name}", getattr(lakeckpt, name)) for name in names)]


def _module(name: str, module: Any) -> list[str]:
    return [f"## {name}", *(_entry(f"{name}.{one}", getattr(module, one)) for one in sorted(module.__all__))]


def _entry(name: str, value: Any) -> str:
    parts = [f"### {name}", _signature_block(name, value), _text(value)]
    if inspect.isclass(value):
        parts += [_fields(value)]
        parts += [_member(member, found) for member, found in _public(value).items() if not member.startswith("_")]
    return "\n\n".join(part for part in parts if part)


def _fields(value: type) -> str:
    """The fields of a dataclass that have a docstring, as a list."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0].body  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return ""
    listed = []
    for pair in pairwise(body):
        match pair:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text))):
                described = inspect.cleandoc(text).replace("\n", "\n  ")
                listed.append(f"* `{name}`: {described}")
    return "\n".join(listed)


def _public(value: type) -> dict[str, Any]:
    """The members of a class, and those that it has from a base that is not public itself."""
    bases = [one for one in value.__mro__[1:] if one.__name__ in ("BaseDataset", "Closing")]
    return {
        **vars(value),
        **{name: one for base in bases for name, one in vars(base).items() if name not in vars(value)},
    }


def _member(name: str, value: Any) -> str:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if not inspect.isfunction(function) or not inspect.getdoc(function):
        return ""
    signature = "" if isinstance(value, property) else _signature(function)
    return f"**`{name}{signature}`**\n\n{_text(function)}"


def _signature_block(name: str, value: Any) -> str:
    signature = _signature(value)
    if not signature:
        return ""
    whole = f"{name.rpartition('.')[2]}{signature}"
    return f"```text\n{_broken(whole)}\n```"


def _one_a_line(signature: str) -> str:
    """Break a signature after the commas that separate its parameters."""
    depth, broken = 0, ""
    for character in signature:
        depth += (character in "([{") - (character in ")]}")
        broken += ",\n   " if character == "," and depth == 1 else character
    return broken


def _signature(value: Any) -> str:
    if not callable(value):
        return ""
    try:
        found = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    found = found.replace("(self, ", "(").replace("(self)", "()")
    found = re.sub(r"(: |-> )(?:'([^']*)'|\"([^\"]*)\")", r"\1\2\3", found)  # annotations are kept as strings
    return re.sub(r"<[^<>]*>", "…", re.sub(r"ForwardRef\('([^']*)'\)", r"\1", found)).removesuffix(" -> None")


def _integrations() -> list[str]:
    """The public names of the integrations, from their source: their frameworks need not be installed."""
    parts = [
        "## lakeckpt.integrations",
        "Each module imports its framework: see [frameworks](../how-to/frameworks.md).",
    ]
    for path in sorted((Path(lakeckpt.__file__).parent / "integrations").glob("[!_]*.py")):
        for one in ast.parse(path.read_text("utf-8")).body:
            if path.stem == "common" or not isinstance(one, ast.ClassDef | ast.FunctionDef) or one.name.startswith("_"):
                continue
            members = one.body if isinstance(one, ast.ClassDef) else [one]
            functions = [member for member in members if isinstance(member, ast.FunctionDef)]
            init = [member for member in functions if member.name in ("__init__", one.name)]
            whole = "".join(one.name + _parameters(member) for member in init)
            parts += [
                f"### lakeckpt.integrations.{path.stem}.{one.name}",
                f"```text\n{_broken(whole)}\n```" if whole else "",
            ]
            parts += [_markdown(ast.get_docstring(one) or "")]
            parts += [
                f"**`{member.name}{'' if member.decorator_list else _parameters(member)}`**\n\n{_markdown(text)}"
                for member in functions
                if not member.name.startswith("_") and member is not one and (text := ast.get_docstring(member))
            ]
    return parts


def _parameters(function: ast.FunctionDef) -> str:
    """The signature of a function in the form of `inspect.signature`, without ``self``."""
    found = ast.unparse(function.args)
    returns = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
    return f"({found.removeprefix('self, ').removeprefix('self')}){returns}".removesuffix(" -> None")


def _broken(signature: str) -> str:
    return signature if len(signature) < 100 else _one_a_line(signature)


def _text(value: Any) -> str:
    return _markdown(inspect.getdoc(value) or "")


def _markdown(text: str) -> str:
    """A docstring as Markdown: arguments become a list, indented parts (trees, examples) stand as they are."""
    text = re.sub(r"Args:\n((?: {4}.*\n?)+)", lambda m: _arguments(m.group(1)), text)
    return re.sub(
        r"::\n\n((?:    .*\n?|\n)+)", lambda m: f":\n\n```text\n{textwrap.dedent(m.group(1)).rstrip()}\n```\n", text
    )


def _arguments(block: str) -> str:
    listed = re.sub(r"^ {4}(\w[\w, *]*): ", r"* `\1`: ", block, flags=re.MULTILINE)
    return re.sub(r"^ {8}", "  ", listed, flags=re.MULTILINE)


def faults() -> str:
    """Return the text of the page of explicit faults."""
    lines = [
        "# Explicit faults",
        "",
        "*Written from `lakeckpt/watch/system/faults.toml` by `docs/reference/generate.py`; do not edit.*",
        "",
        "The rows by which [`lakeckpt faults`](../how-to/faults.md) explains a fault, in their order: the first that",
        "matches holds. The file itself has the codes, signals and expressions of each row, and its source.",
        "A row in italics is no cause: it follows from another fault, or from the order of a launcher or a person.",
        "",
        "| row | cause | restart | what to do |",
        "| --- | --- | --- | --- |",
    ]
    for row in fault_table().rows:
        name = row.id if row.role == "root" else f"*{row.id}*"
        lines.append(f"| {name} | {row.cause} | {row.restart} | {row.remedy} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(generate(), encoding="utf-8")
    FAULTS.write_text(faults(), encoding="utf-8")
