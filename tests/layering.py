"""Which modules may import which? The rules of the layers, and a checker that reads the source without running it.

Every import counts, wherever it stands: at the top, inside a function, under ``if TYPE_CHECKING``, and
``importlib.import_module`` or ``__import__`` with a literal name; with a computed one, every module that a literal
string of the same file names (as the tables of lazy packages do). A name imported from the lazy top-level package
counts as an import of the module that holds it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "lakeckpt"
COMPUTED = "<computed>"

# Imports run downward only: from a larger number to a smaller one, or inside one package.
LEVELS = {
    "errors": 0,
    "cached": 0,
    "counters": 0,
    "versions": 0,
    "progress": 0,
    "wire": 1,
    "core": 2,
    "lake": 3,
    "reading": 4,
    "data": 5,
    "tracking": 6,
    "recovery": 6,
    "watch": 6,
    "checkpoint": 6,
    "bubbles": 7,
    "convert": 7,
    "dcp": 7,
    "metrics": 7,
    "testing": 8,
    "demo": 9,
    "integrations": 8,
    "cli": 9,
}
SIDEWAYS = {
    ("checkpoint", "tracking"),
    ("checkpoint", "recovery"),
    ("checkpoint", "watch"),
    ("recovery", "tracking"),
    ("recovery", "watch"),
    ("watch", "tracking"),
    ("demo", "cli"),
    ("cli", "demo"),
}
THIRD_PARTY = {
    "errors": set(),
    "cached": set(),
    "counters": set(),
    "versions": set(),
    "progress": {"rich"},
    "metrics": {"prometheus_client", "opentelemetry"},
    "wire": {"numpy", "msgpack"},
    "core": {"numpy"},
    "lake": {"numpy", "pyarrow", "fsspec", "s3fs", "botocore", "obstore"},
    "reading": {"numpy", "pyarrow"},
}
STAGES = {"data": ("base", "position", "flows", "workers", "dataset", "streams", "loader")}
"""The folders of a layer, in the order in which data passes them: each imports from itself and the ones before it."""
# Modules of a table format, `lakeckpt.lake.formats.<format>…`, import its library; they are loaded when one is opened.
FORMATS = f"{PACKAGE}.lake.formats."
LIBRARIES = {"delta": {"deltalake"}, "hudi": {"hudi"}, "iceberg": {"pyiceberg", "pyroaring"}}
MAY_IMPORT_TORCH = {"data", "tracking", "checkpoint", "integrations", "testing", "demo", "cli"}
# The commit path: what these load, directly or not, must never be torch.
NEVER_LOADS_TORCH = tuple(
    f"{PACKAGE}.checkpoint.{name}"
    for name in (
        "agent.link",
        "agent.process",
        "arena.checksums",
        "arena.contents",
        "arena.folder",
        "bubbles.gate",
        "peers.alike",
        "peers.next_node",
        "peers.serve",
        "peers.sources",
        "persist.history",
        "persist.log",
        "persist.publish",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import of ``target`` by ``module``; ``at_load`` if it runs when the module is loaded."""

    module: str
    line: int
    target: str
    at_load: bool


def paths_of(root: Path) -> dict[str, Path]:
    """Dotted name to file of every module below ``root``, the folder that holds the package."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def modules_of(root: Path) -> dict[str, ast.Module]:
    """Dotted name to parsed source of every module below ``root``."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in paths_of(root).items()}


def packages_of(root: Path) -> set[str]:
    return {".".join(path.parent.relative_to(root).parts) for path in root.rglob("__init__.py")}


def imports_of(
    module: str, tree: ast.Module, *, is_package: bool, known: set[str], public: Mapping[str, str]
) -> Iterator[Import]:
    """Every import in ``tree``; ``known`` are our modules, ``public`` the lazy names of the top-level package."""
    for node, at_load in _walk(tree, True):
        targets = list(_targets(node, module, is_package, known, public))
        if targets == [COMPUTED]:
            targets = _module_names_in(tree, known) or targets
        for target in targets:
            yield Import(module=module, line=node.lineno, target=target, at_load=at_load)


def _walk(node: ast.AST, at_load: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    for child in ast.iter_child_nodes(node):
        runs = at_load and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            runs = False
        if isinstance(child, ast.stmt | ast.expr):
            yield child, runs
        yield from _walk(child, runs)


def _targets(node: ast.AST, module: str, is_package: bool, known: set[str], public: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            base = ".".join([*parts, base] if base else parts)
        for alias in node.names:
            if base == PACKAGE and alias.name in public:
                yield public[alias.name]
            elif f"{base}.{alias.name}" in known:
                yield f"{base}.{alias.name}"
            elif base == PACKAGE and alias.name.startswith("__"):
                pass  # __version__ and the like load nothing
            else:
                yield base
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
        name = node.args[0] if node.args else None
        yield name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else COMPUTED


def _module_names_in(tree: ast.Module, known: set[str]) -> list[str]:
    """What a computed import may load: all the modules that literal strings of its file name."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(text for text in texts if text in known or text.split(".")[0] == "torch")


def every_import(root: Path, public: Mapping[str, str]) -> dict[str, list[Import]]:
    """Module to its imports, of every module below ``root``; not of the top-level package, which may name anything."""
    trees, packages = modules_of(root), packages_of(root)
    return {
        module: list(imports_of(module, tree, is_package=module in packages, known=set(trees), public=public))
        for module, tree in trees.items()
        if module != PACKAGE
    }


def circle(root: Path, public: Mapping[str, str]) -> list[str]:
    """A chain of modules, each of which imports the one before it, from one module back to itself; empty if none is."""
    every = every_import(root, public)
    graph = {name: {item.target for item in items} & every.keys() - {name} for name, items in every.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def violations(root: Path, public: Mapping[str, str]) -> list[str]:
    """Every import that breaks a rule, as ``module:line: what is wrong``."""
    every = every_import(root, public)
    found = [
        f"{item.module}:{item.line}: {wrong}" for items in every.values() for item in items for wrong in _wrong(item)
    ]
    for module in NEVER_LOADS_TORCH:
        chain = _way_to_torch(module, every, [])
        if chain:
            found.append(f"{module} loads torch: {' > '.join(chain)}")
    return found


def _layer(module: str) -> str:
    name = module.split(".")[1] if module.count(".") else ""
    return "cli" if name == "__main__" else name  # `python -m lakeckpt` is the command


def _stage(module: str) -> int:
    """The number of the stage of its layer that a module is in; 0 for the layer itself, and where it has no stages; -1
    for a folder or a module that is no stage."""
    stages, parts = STAGES.get(_layer(module), ()), module.split(".")
    return 0 if not stages or len(parts) < 3 else 1 + stages.index(parts[2]) if parts[2] in stages else -1


def _format(module: str) -> str:
    """The table format that a module of ours is about; "" for others."""
    name = module.removeprefix(FORMATS) if module.startswith(FORMATS) else ""
    return next((known for known in LIBRARIES if name == known or name.startswith((f"{known}_", f"{known}."))), "")


def _wrong(item: Import) -> Iterator[str]:
    layer = _layer(item.module)
    if layer not in LEVELS:
        yield f"the layer {layer!r} is not one that the design names"
        return
    if _stage(item.module) < 0:
        yield f"{item.module} is in no stage of {layer}: {', '.join(STAGES[layer])}"
    top = item.target.split(".")[0]
    known = _format(item.target)
    if known and item.at_load and _format(item.module) != known:
        yield f"loads {item.target} and its library: import it in the function that needs it"
    if item.target == COMPUTED:
        if layer != "cli":
            yield "imports a module whose name is computed, which no test can follow"
    elif item.target == PACKAGE:
        if LEVELS[layer] < LEVELS["cli"]:
            yield "imports the whole package, through which any layer can be reached"
    elif top == PACKAGE:
        other = _layer(item.target)
        if other != layer and (layer, other) not in SIDEWAYS and LEVELS.get(other, 99) >= LEVELS[layer]:
            yield f"{layer} imports {item.target}, which is not below it"
        elif other == layer and _stage(item.target) > _stage(item.module):
            yield f"{item.module} imports {item.target}, a later stage"
    elif top == "torch":
        if layer not in MAY_IMPORT_TORCH:
            yield f"{layer} imports {item.target}, and must work without torch"
    elif top in LIBRARIES.get(_format(item.module), ()):
        pass
    elif layer in THIRD_PARTY and top not in THIRD_PARTY[layer] and top not in sys.stdlib_module_names:
        yield f"{layer} imports {item.target}, which is neither the standard library nor one of its own few"


def _way_to_torch(module: str, every: Mapping[str, list[Import]], seen: list[str]) -> list[str]:
    """The chain of modules that are loaded with ``module``, up to torch; empty if there is none."""
    for name in _loaded_with(module):
        if name in seen:
            continue
        seen.append(name)
        for item in every.get(name, []):
            if not item.at_load:
                continue
            if item.target.split(".")[0] == "torch":
                return [name, item.target]
            if chain := _way_to_torch(item.target, every, seen):
                return [name, *chain]
    return []


def _loaded_with(module: str) -> list[str]:
    """The module and the packages around it, whose ``__init__`` runs first."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(2, len(parts) + 1)]
