"""This module cuts large tensors into slabs of 16 MiB, which are written and referred to one by one.

A step may touch only some rows of a large embedding. So a tensor that is larger than a slab is stored as several slabs,
each a run of its elements with a name and a digest of its own, and a save writes only the slabs that changed. The cuts
are at multiples of 16 MiB, so that they are the same at every save, and also when the tensor has grown. A row may lie
in two slabs. A slab consists of whole leaves of the digest, so that the checksums of a capture serve both.

The module is pure, and never imports torch.
"""

from __future__ import annotations

import re

from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, LEAF_BYTES, digest_of_leaves
from lakeckpt.checkpoint.format.dtypes import TensorSpec

__all__ = ["SLAB_BYTES", "digests_of_slabs", "is_slab_key", "slab_specs"]

SLAB_BYTES = 16 * 2**20
_MARK = "::slab "
_KEY = re.compile(rf".*{_MARK}[0-9]+", re.ASCII | re.DOTALL)


def slab_specs(spec: TensorSpec, slab_bytes: int) -> list[TensorSpec]:
    """Return what files hold of a tensor, in the order of its bytes: the tensor itself, or its slabs.

    ``slab_bytes`` is a positive multiple of `LEAF_BYTES`.

    >>> [one.key for one in slab_specs(TensorSpec(key="w", dtype="float32", shape=(700, 1000)), 2**21)]
    ['w::slab 0', 'w::slab 1']
    >>> [one.shape for one in slab_specs(TensorSpec(key="w", dtype="float32", shape=(700, 1000)), 2**21)]
    [(524288,), (175712,)]
    """
    assert slab_bytes > 0 and slab_bytes % LEAF_BYTES == 0, slab_bytes
    if spec.size_bytes <= slab_bytes:
        return [spec]
    element = TensorSpec(key=spec.key, dtype=spec.dtype, shape=(1,)).size_bytes
    return [
        TensorSpec(
            key=f"{spec.key}{_MARK}{number}",
            dtype=spec.dtype,
            shape=(min(slab_bytes, spec.size_bytes - at) // element,),
        )
        for number, at in enumerate(range(0, spec.size_bytes, slab_bytes))
    ]


def digests_of_slabs(leaves: bytes, slab_bytes: int) -> list[bytes]:
    """Return the digests of a tensor's slabs from the digests of all its leaves
    (`lakeckpt.checkpoint.format.digests.leaf_digests`).
    """
    step = slab_bytes // LEAF_BYTES * DIGEST_BYTES
    return [digest_of_leaves([leaves[at : at + step]]) for at in range(0, len(leaves), step)]


def is_slab_key(key: str) -> bool:
    """Return whether this is the name of a slab; no tensor of a state may have such a name."""
    return _KEY.fullmatch(key) is not None
