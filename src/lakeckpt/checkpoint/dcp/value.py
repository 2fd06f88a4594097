"""How does what is no tensor lie in a checkpoint of DCP?  As a document of our own, never as a pickle.

DCP's planners pickle every leaf of a state dict that is no tensor of its own. Ours write it as a tree (`lakeckpt`'s
closed list of types) beside the bytes of the tensors inside it. `PerRank` marks a value that each rank has for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fields import fields_of, taken
from lakeckpt.checkpoint.tensors import empty_for, host_bytes, in_dim_order, on_host, spec_of
from lakeckpt.checkpoint.tree import flatten, rebuild, references
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.codec import MAGIC, dumps_map, loads, payload_of

__all__ = ["PerRank", "decode_value", "encode_value", "is_value"]

_KIND = "dcp-value"
# 2.0: how tensors lie in memory, where any does so in an order of dimensions of its own
_VERSION = (2, 0)
_WITHOUT_DIM_ORDERS = (1, 0)


@dataclass(slots=True)
class PerRank:
    """A value of a state dict that every rank has for itself: a reader's state, random states.

    DCP keeps one of several equal names: without this mark it would keep one rank's value for all. After loading,
    ``value`` is what this rank saved; a rank that has none of its own keeps what it has.

    >>> PerRank({"epoch": 3}).value
    {'epoch': 3}
    """

    value: Any


def encode_value(name: str, value: object) -> bytes:
    """The document of a leaf called ``name``. `UnsupportedValue` naming the path of what cannot be written."""
    flat = flatten(name, value)
    tensors = {}
    for key, tensor in flat.tensors.items():
        spec = spec_of(key, tensor)
        tensors[key] = [spec.dtype, list(spec.shape), bytes(host_bytes(on_host(tensor)))]
    parts = {"tree": payload_of(flat.tree, root=name), "tensors": payload_of(tensors, root=name)}
    return dumps_map(parts, kind=_KIND, version=_VERSION if flat.has_dim_orders else _WITHOUT_DIM_ORDERS)


def decode_value(data: bytes | memoryview, like: Any = None) -> Any:
    """What `encode_value` made ``data`` of, shaped ``like`` the live value. `WireError`."""
    plain = fields_of(loads(data, kind=_KIND, supported=_VERSION).value, "a value")
    tensors: dict[str, torch.Tensor] = {}
    for key, row in taken(plain, "tensors", dict).items():
        if type(row) is not list or [type(one) for one in row] != [str, list, bytes]:
            raise WireDamaged(f"tensor {key!r} of a value is {row!r:.80}")
        spec = TensorSpec(key=str(key), dtype=row[0], shape=tuple(row[1]))
        tensor, view = empty_for(spec)
        if len(view) != len(row[2]):
            raise WireDamaged(f"tensor {key!r} of a value has {len(row[2])} bytes, not the {len(view)} of its shape")
        view[:] = row[2]
        tensors[str(key)] = tensor
    if "tree" not in plain:
        raise WireDamaged("a value has no tree")
    for one in references(plain["tree"]):
        if one.key in tensors and one.dim_order is not None:
            if tensors[one.key].dim() != len(one.dim_order):
                raise WireDamaged(f"tensor {one.key!r} of a value lies in the order {list(one.dim_order)}: a wrong one")
            tensors[one.key] = in_dim_order(tensors[one.key], one.dim_order)
    return rebuild(plain["tree"], tensors, like)


def is_value(data: bytes | memoryview) -> bool:
    """Whether these bytes look like a document of ours."""
    return bytes(data[: len(MAGIC)]) == MAGIC
