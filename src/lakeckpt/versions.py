"""This module refuses dependencies that are older than pyproject.toml allows, when lakeckpt is imported.

Images of clusters often carry an older pyarrow or torch that another package pinned. Without this check the first read
would end in an AttributeError. The check reads the versions of installed packages, imports none of them, and passes
over a package without metadata. A test holds the bounds to those of pyproject.toml.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

__all__ = ["LOWEST", "check_versions"]

LOWEST = {
    "pyarrow": (21,),
    "fsspec": (2025, 3, 2),
    "obstore": (0, 12),
    "torch": (2, 6),
    "msgpack": (1, 0, 5),
    "numpy": (2, 0),
    "safetensors": (0, 4, 5),
    "xxhash": (3, 2),
}
"""The lowest version of each package that lakeckpt needs."""


def check_versions() -> None:
    """Raise ``ImportError`` if a package is older than its bound."""
    for name, lowest in LOWEST.items():
        try:
            found = version(name)
        except PackageNotFoundError:  # vendored, or absent: the import says so
            continue
        numbers = re.match(r"\d+(?:\.\d+)*", found or "")
        if numbers is not None and tuple(map(int, numbers[0].split("."))) < lowest:
            needed = ".".join(map(str, lowest))
            raise ImportError(
                f"{name} {found} is installed, and lakeckpt needs {name} {needed} or newer: run "
                f"`pip install '{name}>={needed}'`"
            )
