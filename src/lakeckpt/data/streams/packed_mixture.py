"""This module makes a packed mixture: sequences whose documents come from several sources, which take turns by
documents.

`packed_mixture` is `lakeckpt.pack` of a `lakeckpt.mix`. It refuses what such a mixture cannot have. The module reads
nothing and starts no threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.data.streams.mix import MixedDataset
from lakeckpt.errors import ConfigError, SchemaError
from lakeckpt.reading.packed.packing import Packing

__all__ = ["packed_mixture"]


def packed_mixture(mixed: MixedDataset, packing: Packing, tokenizer: Any) -> MixedDataset:
    """Return a dataset of sequences of the documents of all sources of ``mixed``. `ConfigError`, `SchemaError`."""
    _check(mixed, packing, tokenizer)
    return mixed._remade({name: _documents(name, one, packing) for name, one in mixed._described.items()})


def _check(mixed: MixedDataset, packing: Packing, tokenizer: Any) -> None:
    mixing = mixed._progress.mixing
    assert mixing is not None
    advice = "pack each source, and mix them then"
    wrong = {
        f"a tokenizer=: {advice}": tokenizer is not None,
        f'documents="whole": {advice}': packing.whole,
        f"mask_ends=False, because the next document may be of another source: {advice}": not packing.masks_ends,
        'mix(…, granularity="batch"): its sources take turns by documents': mixing.whole,
        f"mix(…, schedule=…), because lanes are at different documents: leave it out, or {advice}": mixing.schedule,
        f"mix(…, exhausted={mixing.exhausted!r}), because only reading tells when a source is through: leave it at "
        "'next_epoch'": mixing.exhausted != "next_epoch",
        f"mix(…, source_column=…), because a sequence has documents of several sources: {advice}": mixed._source_column,
        "a mixture that is packed already: pack the mixture of rows": mixing.packs,
        "a mixture that was read, or into which a state was loaded: give it a new one": mixed._progress.begun,
    }
    for what, is_there in wrong.items():
        if is_there:
            raise ConfigError(f"pack of a mixture does not take {what}")


def _documents(name: str, dataset: LakeDataset, packing: Packing) -> LakeDataset:
    """Return what reads the documents of the source that ``dataset`` describes."""
    kinds = {
        "sequences of pack(…)": dataset.packing is not None or dataset.yields_many,
        "a transform=": dataset.has_transform,
    }
    for kind, is_there in kinds.items():
        if is_there:
            raise ConfigError(
                f'source {name!r} of the mixture has {kind}, or rows="many", and pack of a mixture takes rows of '
                "tokens: give mix a plain LakeDataset, or pack each source, and mix them then"
            )
    pinned = dataset._versions.at_hand
    try:
        packing.check(pinned.table.schema)
    except SchemaError as error:
        raise SchemaError(f"source {name!r} of the mixture cannot be packed: {error}") from error
    pinned = replace(pinned, columns=[packing.column], nulls=None, tail="short")
    return dataset._remade(pinned, packing, many="pack of a mixture")
