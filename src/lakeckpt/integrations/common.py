"""This module checks which version of a framework is installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from lakeckpt.errors import ConfigError

__all__ = ["require"]


def require(distribution: str, at_least: str, below: str) -> str:
    """Return the version of ``distribution`` that is installed. `ConfigError` where it is none of ``at_least`` (which
    works) to ``below`` (which is not known to work)."""
    try:
        found = version(distribution)
    except PackageNotFoundError:
        found = ""
    if not found or not _release(at_least) <= _release(found) < _release(below):
        wanted = f"{distribution}>={at_least},<{below}"
        raise ConfigError(
            f"lakeckpt.integrations works with {wanted}, and {found or 'none'} is installed: pip install '{wanted}'"
        )
    return found


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what follows them: of a pre-release, those of its release."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in numbers.group().split(".")) if numbers else ()
