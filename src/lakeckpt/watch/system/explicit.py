"""This module explains faults that name themselves: by an exit status, a signal, a text, or a line of the kernel's log.

The table ``faults.toml`` beside this module says what each of them means: the cause, whether it is the fault itself or
follows from another one, what a person does about it, and where a restart is of use. The first row that matches holds;
rows of a user's own file come before the table. A text that no row knows, or only as an exception of the script, is
*normalized*: what differs from one death to the next leaves it, so that equal faults can be counted. The module is
pure but for the files that it reads, imports without torch, and starts no threads.
"""

from __future__ import annotations

import hashlib
import re
import signal as signals
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from lakeckpt.errors import ConfigError

__all__ = ["Explicit", "FaultTable", "Restart", "Role", "fault_table", "normalized", "text_id"]

Role = Literal["root", "cascade"]
"""The fault itself; or it follows from another fault, or from the order of a launcher or a person."""
Restart = Literal["in place", "avoid node", "stop"]
"""A restart may go on; not on this node; or it meets the same again."""
_OWN = "own-exception"
_KEYS = frozenset(("exit", "signal", "text", "kernel", "xid"))
_FLAGS = re.IGNORECASE | re.MULTILINE
_XID = r"\bXid\b(?:\s*\([^)\n]*\))?[\s:=#]*(?:error|code)?[\s:=#]*(?:{})\b"
_BY = r"(?:(?:terminated|died|killed|ended|exited|crashed)(?: with| by| on| due to)|received|caught|got)"
_EXITED = r"\bexit(?:ed|s)?(?: with)?(?: exit)?(?: a)?(?:[ _-]?(?:code|status)|code)?\W{{1,4}}(?:{})\b"
_GOES_ON = re.compile(
    r"\b(?:skipp(?:ing|ed)|retry(?:ing|)|will (?:be )?retr\w+|attempt \d+ ?(?:of|/) ?\d+|fall(?:ing|s|)[ -]?back"
    r"|(?:tr(?:y|ying|ies)) again|ignor(?:ed|ing)|recovered|resolved|resum(?:ed|ing)|succeeded|corrected|continuing"
    r"|no action|creating it|will be created|\w+Warning:"
    r"|from scratch|address family not supported|\b(?:errors|failures|faults)\W{1,3}0(?![\w./])"
    r"|(?:^|[:;,(=] ?)(?:no|0|zero) (?:\w+ )?(?:errors?|failures?|faults?|failed|corrupt\w*|uncorrect\w*))",
    re.IGNORECASE,
)
_INFORMS = re.compile(r"^.{0,120}?(?<![A-Za-z_])(?:INFO|DEBUG|TRACE|NOTICE)(?![A-Za-z_])|^\[?I\d{4} |^\[I[\] ]")
_STATED = re.compile(
    r"[^,.;:\n]*:\s*(?:not active|inactive|no|none|n/a|false|0)(?=\s*(?:[,.;\n]|$))|(?-i:\b[A-Z][A-Z0-9_]{5,}=\S*)"
    r"|\(?\btimeout[ =]\d+ ?(?:s|ms|sec|seconds|min)\b\)?",
    re.IGNORECASE,
)
"""What states that nothing is wrong, or a setting."""
_VARIES = (
    (r"\b\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?|\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?", "<time>"),
    (r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>)\]]+", "<url>"),
    (r"(?<![\w<])(?:[A-Za-z]:)?(?:[~.]{0,2}/)[^\s'\":,;<>()\[\]]+", "<path>"),
    (r"\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b|\[[0-9a-f:]*:[0-9a-f:]+\](?::\d+)?", "<host>"),
    (r"\b(?=[\w-]*[a-z])[\w-]+(?:\.[\w-]+)+:\d+\b|\b[a-z]+(?:-?[a-z]+)*-?\d+(?:\.[\w-]+){2,}\b", "<host>"),
    (r"\b0x[0-9a-f]+\b|\b(?=[0-9a-f-]*\d)(?=[0-9a-f-]*[a-f])[0-9a-f-]{8,}\b", "<hex>"),
    (r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", "<n>"),
)
_VARYING = tuple((re.compile(pattern, re.IGNORECASE), name) for pattern, name in _VARIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explicit:
    """What a row of the table says of a fault."""

    id: str
    role: Role
    cause: str
    remedy: str
    restart: Restart

    @property
    def is_sure(self) -> bool:
        """False if nothing is known but that an exception of Python ended the script."""
        return self.id != _OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    says: Explicit
    exits: frozenset[int]
    signals: frozenset[str]
    kernel: re.Pattern[str] | None
    """What the kernel's log says."""
    pattern: re.Pattern[str] | None
    """What any text says, that of the kernel's log as well."""


class FaultTable:
    """Rows of explicit faults, in their order."""

    def __init__(self, rows: tuple[_Row, ...]) -> None:
        self._rows = rows

    @property
    def rows(self) -> tuple[Explicit, ...]:
        """What the rows say."""
        return tuple(row.says for row in self._rows)

    def knows_kernel_line(self, line: str) -> bool:
        """Whether a row is about this line of the kernel's log."""
        is_fault = not _GOES_ON.search(line)
        return is_fault and any(row.kernel is not None and row.kernel.search(line) for row in self._rows)

    def explain(
        self, text: str = "", *, exit: int | None = None, signal: str = "", died: bool = False
    ) -> Explicit | None:
        """Return the first row that matches the evidence, or None.

        ``text``: lines of a log, or an exception with its type; ``exit``: a status, negative or above 128 for a signal;
        ``signal``: a name such as SIGKILL. Lines that inform, and lines that say that the job goes on (a retry, a
        skipped row), are no faults, nor are settings and what is "not active"; but the ``text`` of a process that
        ``died`` is taken as it is.

        >>> fault_table().explain("OSError: [Errno 28] No space left on device: '/data/x'").cause
        'storage full'
        >>> fault_table().explain(exit=-11).cause, fault_table().explain("loss 2.31, 4,096 tokens/s")
        ('segmentation fault', None)
        """
        if exit is not None and not signal:
            signal = _signal_of(exit)
        if not died:
            lines = [one for one in text.splitlines() if not (_INFORMS.search(one) or _GOES_ON.search(one))]
            text = _STATED.sub("", "\n".join(lines))
        for row in self._rows:
            if row.pattern is not None and text and row.pattern.search(text):
                return row.says
        for row in self._rows:
            if (signal and signal in row.signals) or exit in row.exits:
                return row.says
        return None


@cache
def fault_table(own: str = "") -> FaultTable:
    """Return the table, after the rows of a user's ``own`` file in the same form. Raises `ConfigError` if the file
    cannot be read, or a row is wrong."""
    rows = _rows(resources.files(__package__).joinpath("faults.toml").read_text("utf-8"), "faults.toml")
    if own:
        try:
            with open(own, encoding="utf-8") as file:
                rows = _rows(file.read(), own) + rows
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"watch_faults: {own} cannot be read ({error}): name a TOML file of rows") from error
    return FaultTable(rows)


def _rows(text: str, name: str) -> tuple[_Row, ...]:
    try:
        return tuple(_row(one) for one in tomllib.loads(text)["fault"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise ConfigError(
            f"watch_faults: {name} has a row that cannot be used ({error}): [[fault]] needs id, match, role, cause, "
            "remedy and restart (docs/how-to/faults.md)"
        ) from error


def _row(given: Mapping[str, Any]) -> _Row:
    match = given["match"]
    if not match or set(match) - _KEYS:
        raise ValueError(f"{given['id']}: match has {', '.join(match) or 'nothing'}; known are {', '.join(_KEYS)}")
    if given["role"] not in get_args(Role) or given["restart"] not in get_args(Restart):
        raise ValueError(f"{given['id']}: role is one of {get_args(Role)}, restart of {get_args(Restart)}")
    names = [str(one) for one in match.get("signal", ())]
    numbers = [str(int(one)) for one in match.get("exit", ())]
    kernel = list(match.get("kernel", ()))
    if xid := match.get("xid"):
        kernel.append(_XID.format("|".join(str(int(one)) for one in xid)))
    patterns = [*kernel, *match.get("text", ()), *map(_signal_text, names)]
    if numbers:
        patterns.append(_EXITED.format("|".join(numbers)))
    return _Row(
        says=Explicit(**{key: given[key] for key in ("id", "role", "cause", "remedy", "restart")}),
        exits=frozenset(map(int, numbers)),
        signals=frozenset(names),
        kernel=_any(kernel),
        pattern=_any(patterns),
    )


def _any(patterns: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{one})" for one in patterns), _FLAGS) if patterns else None


def _signal_text(name: str) -> str:
    """Return an expression for the ways in which launchers write that this signal ended a process."""
    number = int(signals.Signals[name])
    return (
        rf"{_BY}(?: the)?(?: signal)?\W{{1,3}}(?:Signals\.)?{name}\b|\bsignal\W{{1,2}}{number}\b"
        rf"|\b{_EXITED.format(f'-{number}|{128 + number}')}"
    )


def _signal_of(status: int) -> str:
    """Return the name of the signal that an exit status stands for; empty if it stands for none."""
    number = -status if status < 0 else status - 128
    try:
        return signals.Signals(number).name if number > 0 else ""
    except ValueError:
        return ""


def normalized(text: str) -> str:
    """Return the text without what differs from one death to the next.

    >>> normalized("rank 3: /data/part-07.parquet at 10.0.0.7:4443 broke after 12.5 s (0x7f3a)")
    'rank <n>: <path> at <host> broke after <n> s (<hex>)'
    """
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    return " ".join(text.split())


def text_id(text: str) -> str:
    """Return a short name of a normalized text, the same on all nodes and in all runs."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
