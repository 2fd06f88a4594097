"""The values behind the golden documents of this folder, and how each was written.

``python -m tests.golden.wire.values`` writes the documents that are missing. A document that is there is never
written again: it stands for files that a released version left on users' disks. A change of format adds new ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lakeckpt.wire.envelope import TensorRef, dumps

FOLDER = Path(__file__).parent
KIND = "golden"
VERSION = (1, 0)

_RECORD = np.dtype([("b", "<i4"), ("a", "|b1")])

GOLDEN: dict[str, Any] = {
    "native": {
        "none": None,
        "bools": [True, False],
        "ints": [0, 127, 128, -1, -32, -33, -128, -129, 2**16, 2**32, 2**63, 2**64 - 1, -(2**63)],
        "floats": [0.0, -0.0, 1.5, float("inf"), float("-inf"), 5e-324],
        "texts": ["", "a", "é", "日本語 🌊", "x" * 300],
        "bytes": [b"", b"\x00\xff", b"y" * 300],
        "order": {"z": 1, "a": 2, "": 3},
        "nested": [[[], {}], [{"k": [1, [2, [3]]]}]],
        "many": list(range(70_000, 70_020)) + [0] * 65_536,
    },
    "tagged": {
        "tuples": ((), (1,), (1, (2, "x"), [3])),
        "big": [2**64, -(2**63) - 1, 2**200, -(2**200), 10**50],
        "complex": [1 + 2j, complex(-0.0, float("inf"))],
        "keys": {0: "int", -1.5: "float", None: "none", True: "bool", b"b": "bytes", (1, "x"): "tuple", "s": "str"},
        "tensor": TensorRef(key="optimizer/0/exp_avg"),
        "channels last": TensorRef(key="optimizer/1/exp_avg", dim_order=(0, 2, 3, 1)),
    },
    "numpy": {
        "scalars": [
            np.bool_(True),
            np.int8(-1),
            np.uint64(2**64 - 1),
            np.float16(0.5),
            np.float32(-0.0),
            np.complex64(1j),
            np.datetime64("2024-02-29T01:02:03", "us"),
            np.timedelta64("NaT", "s"),
            np.str_("é"),
            np.bytes_(b"\x01"),
        ],
        "arrays": [
            np.arange(6, dtype="<f4").reshape(2, 3),
            np.arange(3, dtype=">u2"),
            np.array([True, False]),
            np.zeros((0, 4), dtype="<i8"),
            np.array(7, dtype="|i1"),
            np.array(["a", "日本"], dtype="<U2"),
            np.array([b"ab", b"c"], dtype="|S2"),
            np.array(["2024-02-29", "NaT"], dtype="<M8[D]"),
            np.array([(1, True), (2, False)], dtype=_RECORD),
            np.zeros(1, dtype=[("m", "<f8", (2, 2)), ("inner", [("x", "|u1")])]),
        ],
        "dtypes": [np.dtype("<f8"), np.dtype(">i4"), np.dtype("<M8[ns]"), _RECORD, np.dtype("|V3")],
    },
}


def written(name: str) -> bytes:
    """The document as this version of the library writes it."""
    return dumps(GOLDEN[name], kind=KIND, version=VERSION)


def path_of(name: str) -> Path:
    return FOLDER / f"{name}-1.0.lkc"


def main() -> None:
    for name in GOLDEN:
        path = path_of(name)
        if not path.exists():
            path.write_bytes(written(name))
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
