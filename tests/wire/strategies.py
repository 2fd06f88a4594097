"""Values of the closed list of types, as hypothesis draws them."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.extra.numpy as npst
import numpy as np
from hypothesis import strategies as st

from lakeckpt.wire.envelope import TensorRef

plain_dtypes = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(endianness="?"),
    npst.datetime64_dtypes(endianness="?"),
    npst.timedelta64_dtypes(endianness="?"),
    npst.unicode_string_dtypes(endianness="?", min_len=1),
    npst.byte_string_dtypes(min_len=1),
)


records = st.lists(plain_dtypes, min_size=1, max_size=4).map(
    lambda fields: np.dtype([(f"field {at}", dtype) for at, dtype in enumerate(fields)])
)
dtypes = st.one_of(plain_dtypes, records)
arrays = dtypes.flatmap(
    lambda dtype: npst.arrays(dtype=dtype, shape=npst.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3))
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.one_of(
    npst.scalar_dtypes().flatmap(lambda d: npst.arrays(dtype=d, shape=())).map(lambda a: a[()]),
    texts.map(lambda text: np.str_(text.rstrip("\0"))),
    st.binary(max_size=5).map(lambda data: np.bytes_(data.rstrip(b"\0"))),
)
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**200), max_value=2**200),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    texts,
    st.binary(max_size=12),
)
leaves = st.one_of(
    hashable_leaves,
    st.floats(),
    st.complex_numbers(),
    scalars,
    arrays,
    dtypes,
    texts.map(lambda key: TensorRef(key=key)),
    st.builds(TensorRef, key=texts, dim_order=st.permutations(range(4)).map(tuple)),
)
keys = st.recursive(hashable_leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=3)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(texts, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)
