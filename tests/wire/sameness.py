"""Equality as the codec promises it: types exact, floats to the bit, dicts in order."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import numpy as np


def same(a: Any, b: Any) -> bool:
    """Whether ``b`` is what must come back for ``a``."""
    if type(a) is OrderedDict:
        a = dict(a)
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    if type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) is dict:
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if type(a) is np.ndarray:
        if not (same(a.dtype, b.dtype) and a.shape == b.shape):
            return False
        if a.dtype.names is not None:  # what lies between fields is nobody's value
            return all(same(a[name], b[name]) for name in a.dtype.names)
        return a.tobytes() == b.tobytes()
    if isinstance(a, np.dtype):
        return a == b and a.byteorder == b.byteorder and a.isalignedstruct == b.isalignedstruct
    if isinstance(a, (np.str_, np.bytes_)):  # of an empty one, numpy's tobytes() has characters that are not there
        return a.dtype == b.dtype and bool(a == b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)
