"""Which runs of a large tensor are written, or left unwritten, by themselves?  Slabs of 16 MiB, from its first byte on.

Of a large embedding a step touches some rows. So a tensor that is larger than a slab lies in files as several, each a
run of its elements under a name of its own, with its own digest: only those whose content changed are written again.
Where they are cut depends on nothing but the bytes in front, so that it is the same at every save, and for a table that
grew; rows may lie across a border. A slab consists of whole leaves of digests: those of the capture serve both.

Pure. Imports without torch.
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
    """What lies in files of a tensor, in the order of its bytes: itself, or one run of elements behind the other.

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
    """The digests of the slabs of a tensor, of those of all its leaves
    (`lakeckpt.checkpoint.format.digests.leaf_digests`).
    """
    step = slab_bytes // LEAF_BYTES * DIGEST_BYTES
    return [digest_of_leaves([leaves[at : at + step]]) for at in range(0, len(leaves), step)]


def is_slab_key(key: str) -> bool:
    """Whether a name is that of a slab: no tensor of a state may be called so."""
    return _KEY.fullmatch(key) is not None
