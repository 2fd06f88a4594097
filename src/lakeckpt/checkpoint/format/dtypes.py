"""This module maps dtypes of torch to the dtypes of safetensors files, without torch.

A tensor has a logical dtype (torch's name) and shape. A file has a stored dtype (the code of safetensors) and shape.
They differ only if the torch reader of safetensors knows no code: complex numbers are stored as real and imaginary
parts (one more dimension of 2, last), and rare one-byte types as U8. The record of a part names the logical dtype and
shape. A dtype that is not in the table is refused, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from lakeckpt.errors import UnsupportedValue
from lakeckpt.wire.documents import Count, as_row

__all__ = ["CODE_BYTES", "TensorSpec"]

CODE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Safetensors code that we write → bytes of one element."""

_STORED: dict[str, tuple[str, tuple[int, ...]]] = {
    "float64": ("F64", ()),
    "float32": ("F32", ()),
    "float16": ("F16", ()),
    "bfloat16": ("BF16", ()),
    "int64": ("I64", ()),
    "int32": ("I32", ()),
    "int16": ("I16", ()),
    "int8": ("I8", ()),
    "uint64": ("U64", ()),
    "uint32": ("U32", ()),
    "uint16": ("U16", ()),
    "uint8": ("U8", ()),
    "bool": ("BOOL", ()),
    "float8_e4m3fn": ("F8_E4M3", ()),
    "float8_e5m2": ("F8_E5M2", ()),
    "float8_e4m3fnuz": ("U8", ()),
    "float8_e5m2fnuz": ("U8", ()),
    "float8_e8m0fnu": ("U8", ()),
    "float4_e2m1fn_x2": ("U8", ()),
    "complex32": ("F16", (2,)),
    "complex64": ("F32", (2,)),
    "complex128": ("F64", (2,)),
}


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The name, logical dtype (torch's name, without ``torch.``) and logical shape of a tensor."""

    key: str
    dtype: str
    shape: tuple[Count, ...]

    def __post_init__(self) -> None:
        if self.dtype not in _STORED:
            raise UnsupportedValue(f"tensor {self.key!r}: dtype {self.dtype!r} cannot be stored: convert it")

    @property
    def code(self) -> str:
        """The safetensors code of its elements."""
        return _STORED[self.dtype][0]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return (*self.shape, *_STORED[self.dtype][1])

    @property
    def size_bytes(self) -> int:
        """Its size in the file, and in memory."""
        return prod(self.stored_shape) * CODE_BYTES[self.code]
