"""How does a state become a file of ``torch.save`` that anybody loads without running code?

Of tensors and plain values, such as ``torch.load(weights_only=True)`` takes: what else a state holds is named and
refused. torch's own writer writes a file without its last name; it is loaded again, brought to the disk, and only then
called what it was to be called. A file that is there is never written over.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lakeckpt.checkpoint.foreign.torch_file import SUFFIXES
from lakeckpt.errors import ConfigError, SaveFailed, UnsupportedValue

__all__ = ["write_torch_file"]

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)
_MAPPINGS: dict[type, Callable[[dict[Any, Any]], dict[Any, Any]]] = {OrderedDict: OrderedDict, Counter: Counter}
"""Those that torch loads as they are; others become a dict."""
_MOST_NAMED = 10


def write_torch_file(path: str, state: Mapping[str, Any]) -> None:
    """Write ``state`` into the new local file ``path``, durably.

    Raises `UnsupportedValue` naming what ``torch.load(weights_only=True)`` would refuse, `ConfigError` where the file
    is there, or is not called as such files are, `SaveFailed` where the disk does not take it.
    """
    if not path.endswith(SUFFIXES):
        raise ConfigError(f"a file of torch.save is called *{', *'.join(SUFFIXES)}: {path!r} could not be read again")
    others = [f"{name} ({type(one).__module__}.{type(one).__qualname__})" for name, one in _refused(state, "")]
    if others:
        shown = ", ".join(others[:_MOST_NAMED])
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        raise UnsupportedValue(
            f"torch.load(weights_only=True) takes tensors and plain values, and this state holds {shown}{more}: choose "
            "a part of it, such as item='model'"
        )
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    unfinished = os.path.join(folder, f".{os.path.basename(path)}.{secrets.token_hex(8)}")
    try:
        with open(unfinished, "xb") as file:
            torch.save(_ready(state), file)
            file.flush()
            os.fsync(file.fileno())
        torch.load(unfinished, weights_only=True, mmap=True, map_location="cpu")
        os.link(unfinished, path)  # unlike a rename, it takes nobody's place
    except FileExistsError:
        raise ConfigError(f"{path!r} is there already: choose a new name") from None
    except pickle.UnpicklingError as error:
        raise UnsupportedValue(f"torch.load(weights_only=True) does not take this state: {error!s:.400}") from error
    except OSError as error:
        raise SaveFailed(f"{path!r} could not be written: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _refused(key, f"{name}.{key!s:.80} as a key".lstrip(".")) if type(key) is not str else ()
            yield from _refused(one, f"{name}.{key!s:.80}".lstrip("."))
    elif kind in (list, tuple, set):
        for at, one in enumerate(value):
            yield from _refused(one, f"{name}.{at}")
    elif kind not in _SCALARS and not isinstance(value, torch.Tensor):
        yield name, value


def _ready(value: Any) -> Any:
    """``value`` for torch's writer: a tensor that lies in a larger storage would take all of it along."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    if isinstance(value, Mapping):
        made = _MAPPINGS.get(type(value), dict)
        return made({key: _ready(one) for key, one in value.items()})
    return type(value)(map(_ready, value)) if type(value) in (list, tuple) else value
