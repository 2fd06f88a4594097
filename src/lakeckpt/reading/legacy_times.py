"""Can nanoseconds since 1970 hold these timestamps?  Asked of legacy 96-bit ones, which count days and nanoseconds.

pyarrow makes nanoseconds of them without a look at whether they fit: 9999-12-31, which many a writer means "for ever"
by, becomes a day in 1816. So they are decoded in milliseconds, which hold them all, and looked at here.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["fit_nanoseconds"]

_MOST_MS = (2**63 - 1) // 10**6


def fit_nanoseconds(array: pa.Array) -> bool:
    """Whether every timestamp in ``array``, in milliseconds and at any depth of it, fits.

    >>> far = pa.array([[0, None], [253402214400000]], pa.list_(pa.timestamp("ms")))
    >>> fit_nanoseconds(far), fit_nanoseconds(far[:1])
    (False, True)
    """
    if pa.types.is_timestamp(array.type):
        bounds = pc.min_max(array.cast(pa.int64()))
        least, most = bounds["min"].as_py(), bounds["max"].as_py()
        return least is None or (least > -_MOST_MS and most < _MOST_MS)
    if pa.types.is_struct(array.type):
        return all(map(fit_nanoseconds, array.flatten()))
    if pa.types.is_map(array.type):
        return fit_nanoseconds(array.keys) and fit_nanoseconds(array.items)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return fit_nanoseconds(array.flatten())
    return True
