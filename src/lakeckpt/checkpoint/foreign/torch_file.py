"""What lies in a file of ``torch.save``, without unpickling it?  A zip of one pickle and the bytes of its tensors.

The pickle is described (``pickles``), never run; the bytes of tensors are read from the archive's records, in spans,
straight into where they go, and compared with the CRC-32 that the archive has of each: torch itself compares none. What
is compressed, encrypted, big-endian, in the form of before torch 1.6 or not as torch writes it is refused.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fetch import read_object
from lakeckpt.checkpoint.foreign.pickles import Name, describe
from lakeckpt.checkpoint.foreign.plain import plain
from lakeckpt.checkpoint.tensors import empty_for
from lakeckpt.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    LakeckptError,
    LimitExceeded,
    UnsupportedValue,
    WireDamaged,
)
from lakeckpt.lake.storage import Storage
from lakeckpt.lake.storage import describe as describe_storage

__all__ = ["SUFFIXES", "Read", "TorchFile", "read_torch_file"]

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""How files of ``torch.save`` are called."""

Read = Callable[[int, int], bytes]
"""(start, stop) → those bytes; fewer where the object ends before."""

_OLD_FORM = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
"""A pickle of torch's magic number, with which its files began before they were archives."""
_SPAN_BYTES = 16 * 2**20
_PICKLE_BYTES = 256 * 2**20
_WINDOW_BYTES = 64 * 2**10
_NO_ZIP = (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError, struct.error)
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


def read_torch_file(storage: Storage, path: str) -> dict[str, Any]:
    """The state that ``torch.save`` wrote into the object ``path``: a mapping.

    Raises `CheckpointNotFound`, `CheckpointDamaged`, and `UnsupportedValue` naming what only running its pickle could
    make.
    """
    sizes = {one.path: one.size_bytes for one in storage.list(path)}
    if path not in sizes:
        raise CheckpointNotFound(f"there is no {path} in {describe_storage(storage)!r}")
    if read_object(storage, path, 0, len(_OLD_FORM)) == _OLD_FORM:
        raise UnsupportedValue(
            f"{path}: it is in the form of before torch 1.6, which cannot be read without running its pickles: where "
            "you trust it, load it with torch and save it anew"
        )
    found = TorchFile(partial(read_object, storage, path), sizes[path], what=path).value()
    if not isinstance(found, Mapping):
        raise UnsupportedValue(f"{path}: it holds a {type(found).__name__}, not a state of several names")
    return dict(found)


class TorchFile:
    """A file of ``torch.save`` of ``size_bytes``, read by ``read``; ``what`` names it in messages."""

    def __init__(self, read: Read, size_bytes: int, *, what: str) -> None:
        self._what, self._size_bytes = what, size_bytes
        self._storages: dict[tuple[str, str], torch.Tensor] = {}
        window = io.BufferedReader(_Window(read, size_bytes), _WINDOW_BYTES)
        try:
            self._zip = zipfile.ZipFile(window)
            self._records = {one.filename: one for one in self._zip.infolist()}
        except LakeckptError:
            raise
        except _NO_ZIP as error:
            raise CheckpointDamaged(f"{what}: this is no whole file of torch.save: {error}") from None
        if len(self._records) != len(self._zip.infolist()):
            raise CheckpointDamaged(f"{what}: two records of its archive have one name")
        pickles = [name for name in self._records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointDamaged(f"{what}: its archive holds no data.pkl, as torch.save writes it")
        self._prefix = pickles[0].removesuffix("data.pkl")

    def value(self) -> Any:
        """What was saved, of plain values and tensors. `UnsupportedValue`, `CheckpointDamaged`, `LimitExceeded`."""
        order = self._prefix + "byteorder"
        if order in self._records and self._small(order) != b"little":
            raise UnsupportedValue(f"{self._what}: its tensors are not little-endian")
        data = self._small(self._prefix + "data.pkl")
        try:
            return plain(describe(data), size_bytes=len(data), tensors=self._tensor, what=self._what)
        except WireDamaged as error:
            raise CheckpointDamaged(
                str(error) if str(error).startswith(self._what) else f"{self._what}: {error}"
            ) from error

    def _small(self, name: str) -> bytes:
        record = self._record(name)
        if record.file_size > _PICKLE_BYTES:
            raise LimitExceeded(
                f"{self._what}: {name} has {record.file_size} bytes, more than the {_PICKLE_BYTES} read"
            )
        data = bytearray(record.file_size)
        self._fill(record, memoryview(data))
        return bytes(data)

    def _record(self, name: str) -> zipfile.ZipInfo:
        record = self._records.get(name)
        if record is None:
            raise CheckpointDamaged(f"{self._what}: its archive lacks {name}")
        if (
            record.compress_type != zipfile.ZIP_STORED
            or record.flag_bits & 1
            or record.compress_size != record.file_size
        ):
            raise UnsupportedValue(f"{self._what}: {name} is compressed or encrypted, which torch never does")
        if record.file_size > self._size_bytes:  # told before memory is made for it
            raise CheckpointDamaged(f"{self._what}: {name} has {record.file_size} bytes, more than the whole file")
        return record

    def _fill(self, record: zipfile.ZipInfo, into: memoryview) -> None:
        try:
            with self._zip.open(record) as stream:
                at = 0
                while at < len(into):
                    run = stream.read(min(_SPAN_BYTES, len(into) - at))
                    if not run:
                        raise CheckpointDamaged(f"{self._what}: {record.filename} is cut short")
                    into[at : at + len(run)] = run
                    at += len(run)  # with the last bytes, the CRC is compared
        except LakeckptError:
            raise
        except _NO_ZIP as error:
            raise CheckpointDamaged(f"{self._what}: {record.filename} is not what was written: {error}") from None

    def _tensor(
        self, what: str, key: Any, dtype: str | None, first: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        """The tensor of a storage that the pickle names as ``("storage", class, key, device, elements)``."""
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or not isinstance(key[1], Name):
            raise WireDamaged(f"{what}: a tensor's storage is not named as torch does")
        if dtype is None and key[1].module in ("torch", "torch.storage"):
            dtype = _STORAGES.get(key[1].name)
        if dtype is None or type(key[2]) is not str:
            raise UnsupportedValue(f"{what}: a {key[1]} cannot be read without running its pickle")
        storage = self._storage(key[2], dtype)
        reach = first + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) if prod(shape) else -1
        if reach >= len(storage):
            raise WireDamaged(
                f"{what}: a tensor of shape {shape} reaches beyond its storage of {len(storage)} elements"
            )
        if prod(shape) > len(storage):
            raise UnsupportedValue(
                f"{what}: a tensor of shape {shape} repeats the {len(storage)} elements that are there, as an expanded "
                "one does: save it as tensor.contiguous()"
            )
        return storage.as_strided(shape, strides, first) if prod(shape) else storage.new_empty(shape)

    def _storage(self, key: str, dtype: str) -> torch.Tensor:
        """The elements of a storage, read once."""
        if (key, dtype) not in self._storages:
            record = self._record(f"{self._prefix}data/{key}")
            spec = TensorSpec(key=self._what, dtype=dtype, shape=(record.file_size // _item(dtype),))
            storage, view = empty_for(spec)
            if len(view) != record.file_size:
                raise WireDamaged(f"{record.filename} has {record.file_size} bytes, no number of {dtype}")
            self._fill(record, view)
            self._storages[key, dtype] = storage
        return self._storages[key, dtype]


def _item(dtype: str) -> int:
    return TensorSpec(key="", dtype=dtype, shape=(1,)).size_bytes


class _Window(io.RawIOBase):
    """A file object over a range of an object."""

    def __init__(self, read: Read, size_bytes: int) -> None:
        super().__init__()
        self._read, self._size_bytes, self._at = read, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise ValueError("before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size_bytes)
        data = self._read(self._at, stop) if stop > self._at else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
