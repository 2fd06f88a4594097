"""How does a reader state lie in a checkpoint?  In a few hundred bytes, whatever the size of the table.

The document (kind ``reader-state``) holds ``[table, selection, seed, numbers]``, and since 1.1 what the table's format
calls its version, where it has a name. The digests are bytes where they are hex; ``numbers`` are unsigned LEB128
(`lakeckpt.wire.varint`), chosen so that what is usual takes a byte:

=========  ==========================================================================================================
what       numbers
=========  ==========================================================================================================
identity   flags (1 shuffle, 2 endless, 4 a base follows), tail (0 short, 1 drop, 2 even, 3 rows), permutation version,
           rows, window
place      epoch, steps since the last segment began, row
segments   their number; for each: steps since the one before began, how far its micro-batch is from the one that the
           segment before would have reached (zigzag), lanes, batch size, world size
base       next epoch, the number of epochs that had begun; for each: epochs since the one before, lanes, rotation, the
           number of intervals; for each interval: positions since the one before ended, length
=========  ==========================================================================================================

A state of up to 32 segments takes at most 1 KiB; each interval of a base adds at most 16 bytes. It never holds anything
that the plain state does not, and reading one makes every check that `ReaderState` makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from lakeckpt.core.ends import Tail
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.rest import Left, Rest
from lakeckpt.core.state import Identity, ReaderState, Segment
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.codec import dumps, loads
from lakeckpt.wire.varint import pack_numbers, unpack_numbers

__all__ = ["KIND", "VERSION", "dumps_state", "loads_state"]

KIND = "reader-state"
VERSION = (1, 1)
_NAMELESS = (1, 0)
_TAILS: tuple[Tail, ...] = get_args(Tail)
_SHUFFLE, _ENDLESS, _BASE = 1, 2, 4


def dumps_state(state: ReaderState) -> bytes:
    """The document of ``state``; equal states give equal bytes.

    Raises `UnsupportedValue` for a state that no reader could have reached (numbers beyond 2**63).
    """
    identity = state.identity
    value = [
        _digest_to_wire(identity.table),
        _digest_to_wire(identity.selection),
        identity.spec.seed,
        pack_numbers(_numbers(state)),
    ]
    if identity.version:
        return dumps([*value, identity.version], kind=KIND, version=VERSION)
    return dumps(value, kind=KIND, version=_NAMELESS)


def loads_state(data: bytes) -> ReaderState:
    """The state that `dumps_state` made ``data`` of.

    Raises `WireDamaged` where it is none, `NewerFormat` where a newer lakeckpt wrote it.
    """
    value = loads(data, kind=KIND, supported=VERSION).value
    if not isinstance(value, list) or len(value) < 4:
        raise WireDamaged(f"a reader state is [table, selection, seed, numbers], got {value!r:.80}")
    table, selection, seed, packed, version = (*value, "")[:5]
    if type(seed) is not int or type(packed) is not bytes or type(version) is not str:
        raise WireDamaged(
            f"a reader state's seed, numbers and version are an integer, bytes and text, got {seed!r:.40}, "
            f"{packed!r:.40}, {version!r:.40}"
        )
    numbers = unpack_numbers(packed)
    try:
        return _state(_digest_from_wire(table), _digest_from_wire(selection), seed, numbers, version)
    except WireDamaged:
        raise
    except (ValueError, OverflowError) as error:
        raise WireDamaged(f"a document holds no reader state: {error}") from error


def _numbers(state: ReaderState) -> Iterator[int]:
    identity, spec, base = state.identity, state.identity.spec, state.base
    yield _SHUFFLE * spec.shuffle + _ENDLESS * identity.endless + _BASE * (base is not None)
    yield from (_TAILS.index(identity.tail), identity.permutation_version, identity.rows, spec.window)
    yield from (state.epoch, state.step - state.segment.step, state.row, len(state.segments))
    step = micro_batch = world_size = 0
    for segment in state.segments:
        reached = micro_batch + (segment.step - step) * world_size
        yield segment.step - step
        yield _zigzag(segment.micro_batch - reached)
        yield from (segment.num_lanes, segment.batch_size, segment.world_size)
        step, micro_batch, world_size = segment.step, segment.micro_batch, segment.world_size
    if base is not None:
        yield from _rest_numbers(base)


def _rest_numbers(rest: Rest) -> Iterator[int]:
    yield from (rest.next_epoch, len(rest.begun))
    epoch = 0
    for left in rest.begun:
        yield from (left.epoch - epoch, left.num_lanes, left.rotation, len(left.positions))
        epoch, last = left.epoch, 0
        for start, stop in left.positions:
            yield from (start - last, stop - start)
            last = stop


def _state(table: str, selection: str, seed: int, numbers: Iterator[int], version: str) -> ReaderState:
    flags, tail, permutation_version, rows, window = _take(numbers, 5)
    if tail >= len(_TAILS) or flags > _SHUFFLE | _ENDLESS | _BASE:
        raise WireDamaged(f"a reader state has no flags {flags:#x} or no tail {tail}")
    identity = Identity(
        table=table,
        selection=selection,
        rows=rows,
        spec=OrderSpec(seed=seed, shuffle=bool(flags & _SHUFFLE), window=window),
        tail=_TAILS[tail],
        endless=bool(flags & _ENDLESS),
        permutation_version=permutation_version,
        version=version,
    )
    epoch, steps, row, count = _take(numbers, 4)
    segments = tuple(_segments(numbers, count))
    base = _rest(numbers) if flags & _BASE else None
    if next(numbers, None) is not None:
        raise WireDamaged("a reader state has more numbers than it has fields")
    step = steps + (segments[-1].step if segments else 0)
    return ReaderState(identity=identity, epoch=epoch, segments=segments, step=step, row=row, base=base)


def _segments(numbers: Iterator[int], count: int) -> Iterator[Segment]:
    step = micro_batch = last_world_size = 0
    for _ in range(count):
        steps, drift, num_lanes, batch_size, world_size = _take(numbers, 5)
        micro_batch += steps * last_world_size + _unzigzag(drift)
        step, last_world_size = step + steps, world_size
        yield Segment(
            micro_batch=micro_batch, step=step, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size
        )


def _rest(numbers: Iterator[int]) -> Rest:
    next_epoch, count = _take(numbers, 2)
    begun, epoch = [], 0
    for _ in range(count):
        epochs, num_lanes, rotation, intervals = _take(numbers, 4)
        epoch += epochs
        pairs: list[tuple[int, int]] = []
        last = 0
        for _ in range(intervals):
            gap, rows = _take(numbers, 2)
            if not rows or (pairs and not gap):
                raise WireDamaged(f"intervals of epoch {epoch} are empty or touch at position {last}")
            pairs.append((last + gap, last + gap + rows))
            last += gap + rows
        begun.append(Left(epoch=epoch, positions=Intervals.of(pairs), num_lanes=num_lanes, rotation=rotation))
    return Rest(begun=tuple(begun), next_epoch=next_epoch)


def _take(numbers: Iterator[int], count: int) -> list[int]:
    """The next ``count`` numbers; WireDamaged where there are fewer."""
    found = [number for _, number in zip(range(count), numbers, strict=False)]
    if len(found) < count:
        raise WireDamaged("a reader state is cut short: it has fewer numbers than its counts say")
    return found


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1


def _unzigzag(number: int) -> int:
    return number >> 1 if not number & 1 else -(number + 1 >> 1)


def _digest_to_wire(digest: str) -> bytes | str:
    try:
        raw = bytes.fromhex(digest)
    except ValueError:
        return digest
    return raw if raw and raw.hex() == digest else digest


def _digest_from_wire(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str):
        return value
    raise WireDamaged(f"a digest in a reader state is bytes or text, got {value!r:.40}")
