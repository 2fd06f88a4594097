"""This module checks whether an integration fits the version of its framework that is installed.

An integration names the versions that its tests ran with, and the names of the framework that it uses. So another
version is not refused for its number: it is refused if it is known to break, or if it lacks one of these names.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lakeckpt.errors import ConfigError, UntestedVersionWarning

__all__ = ["Framework"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """The versions of a framework that an integration was tested with, from ``oldest`` to ``newest``."""

    distribution: str
    """The name that pip knows."""
    oldest: str
    newest: str
    broken: tuple[tuple[str, str, str], ...] = ()
    """(first version, first version after, reason) of the versions that are known to break."""

    @contextmanager
    def imports(self) -> Iterator[None]:
        """Check the version, and run the body, which imports names of the framework.

        `ConfigError` if no version is installed, if the version is known to break, and for a name that is missing.
        `UntestedVersionWarning` for a version that the tests did not run with.
        """
        found = self._found()
        if not found:
            raise ConfigError(f"{self.distribution} is not installed: pip install '{self._tested}'")
        for first, after, reason in self.broken:
            if _release(first) <= _release(found) < _release(after):
                raise ConfigError(f"{self.distribution} {found} does not work: {reason}. pip install '{self._tested}'")
        if not _release(self.oldest) <= _release(found) or _release(found)[:2] > _release(self.newest)[:2]:
            warnings.warn(
                f"lakeckpt.integrations was tested with {self.distribution} {self.oldest} to {self.newest}, and "
                f"{found} is installed. It is used if it has the names that are needed",
                UntestedVersionWarning,
                stacklevel=4,
            )
        try:
            yield
        except ImportError as error:
            raise self._lacks(str(error)) from error

    def check(self, owner: object, *seams: str) -> None:
        """Raise `ConfigError` for the first of ``seams`` that ``owner`` lacks.

        A seam is a path of attributes, such as ``"fit_loop.epoch_loop"``. A path that ends with parentheses is a method
        that takes the parameters in them by name: ``"setup_data()"``, ``"state_dict(prefix)"``.
        """
        name = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        for seam in seams:
            path, is_method, parameters = seam.removesuffix(")").partition("(")
            *parents, last = path.split(".")
            found = owner
            for one in parents:
                found = getattr(found, one, None)
            try:
                inspect.getattr_static(found, last)  # a property is not run
                if is_method:
                    known = inspect.signature(getattr(found, last)).parameters
                    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
                    missing = {one for one in parameters.split(", ") if one} - set(known)
                    if missing and not takes_all:
                        raise AttributeError
            except (AttributeError, TypeError) as error:
                raise self._lacks(f"{name} has no {seam}") from error

    @property
    def _tested(self) -> str:
        return f"{self.distribution}>={self.oldest},<={self.newest}"

    def _found(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""

    def _lacks(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.distribution} {self._found()} lacks what lakeckpt.integrations uses: {what}. "
            f"pip install '{self._tested}', which was tested"
        )


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what follows them. A pre-release counts as its release."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in numbers.group().split(".")) if numbers else ()
