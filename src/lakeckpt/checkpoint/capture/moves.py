"""This module prepares the copies of each slice once: views of source and target, sorted by how they are copied.

In host memory, numpy copies large pieces, and one call of torch copies all small pieces. Both release the interpreter's
lock, and start no threads that would take cores from training. A tensor that is not a contiguous run of bytes is copied
as a whole, with the first of its slices. Pieces on a device are copied by its `Link`. The caller decides when to copy,
and keeps the memory unchanged meanwhile. The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from lakeckpt.checkpoint.arena.slices import SlicePiece
from lakeckpt.checkpoint.capture.links import CopyBatch, Link, Ticket
from lakeckpt.checkpoint.capture.plan import CapturePlan
from lakeckpt.checkpoint.state.tensors import as_bytes, lent

__all__ = ["Issued", "Links", "Moves", "early_moves", "flat_bytes", "joined", "late_moves", "link_of", "wait_all"]

Links = Mapping[torch.device, Link]
"""device → its link; devices without a link are not among them."""
_LARGE_BYTES = 64 * 2**10
_Bytes = npt.NDArray[np.uint8]


def link_of(tensor: torch.Tensor, links: Links) -> Link | None:
    """Return the link by which ``tensor`` leaves its device; None for host memory."""
    return links.get(tensor.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """Copies that a link has queued. Their memory is kept until they are done."""

    link: Link
    ticket: Ticket
    batch: CopyBatch


@dataclass(slots=True)
class Moves:
    """Copies that are made together."""

    size_bytes: int = 0
    _large: list[tuple[_Bytes, _Bytes]] = field(default_factory=list)
    """(to, from)."""
    _small_to: list[torch.Tensor] = field(default_factory=list)
    _small_from: list[torch.Tensor] = field(default_factory=list)
    _linked: dict[Link, CopyBatch] = field(default_factory=dict)

    @property
    def is_linked(self) -> bool:
        """True if any of the copies comes from a device with a link."""
        return bool(self._linked)

    def _takes(self, other: Moves, most_bytes: int) -> bool:
        """Return whether ``other`` uses the same links and no other way, and both fit into ``most_bytes``."""
        return (
            self.is_linked
            and self._linked.keys() == other._linked.keys()
            and not (self._large or other._large or self._small_to or other._small_to)
            and self.size_bytes + other.size_bytes <= most_bytes
        )

    def add(self, to: torch.Tensor, source: torch.Tensor, link: Link | None, *, is_early: bool = False) -> None:
        """Add a copy of equal shapes and dtypes.

        ``is_early``: the copy is made only at the cut, and ``source`` may be resized at any other time. torch refuses
        to resize tensors that are read beside training.
        """
        self.size_bytes += to.nbytes
        if link is not None:
            self._linked.setdefault(link, CopyBatch([])).pairs.append((to, source))
        elif _is_run(to) and _is_run(source) and to.nbytes >= _LARGE_BYTES:
            self._large.append((to.numpy(), lent(source) if is_early else source.numpy()))
        else:
            self._small_to.append(to)
            self._small_from.append(source)

    def make(self) -> list[Issued]:
        """Make the copies in host memory and queue the others."""
        issued = [Issued(link=link, ticket=link.copy(batch), batch=batch) for link, batch in self._linked.items()]
        if self._small_to:
            with torch.no_grad():
                torch._foreach_copy_(self._small_to, self._small_from)
        for large, source in self._large:
            np.copyto(large, source)
        return issued

    def kept(self) -> Moves:
        """Copy now on the devices, and return moves from these copies. Host memory is copied at once."""
        found = Moves(size_bytes=self.size_bytes)
        for link, batch in self._linked.items():
            copies = link.kept([source for _, source in batch.pairs])
            link.order()  # moves from the copies come after the copies
            found._linked[link] = CopyBatch([(to, copy) for (to, _), copy in zip(batch.pairs, copies, strict=True)])
        Moves(_large=self._large, _small_to=self._small_to, _small_from=self._small_from).make()
        return found


def joined(moves: Sequence[Moves], *, most_bytes: int) -> list[Moves]:
    """Join neighbours that come entirely from one device, up to ``most_bytes`` together.

    Each copy costs the host a tenth of a millisecond, and blocks the training thread's interpreter lock for as long.
    """
    found: list[Moves] = []
    for one in moves:
        if found and found[-1]._takes(one, most_bytes):
            last = found.pop()
            one = Moves(
                size_bytes=last.size_bytes + one.size_bytes,
                _linked={
                    link: CopyBatch([*batch.pairs, *one._linked[link].pairs]) for link, batch in last._linked.items()
                },
            )
        found.append(one)
    return found


def _is_run(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"


def late_moves(plan: CapturePlan, memory: torch.Tensor, links: Links, *, skips: Container[str] = ()) -> list[Moves]:
    """Return the copies of the late tensors in each slice of ``memory``, the bytes of a generation's data. Tensors that
    ``skips`` names lie there already."""
    flats: dict[str, torch.Tensor | None] = {}
    found = []
    for pieces in plan.slices.slices:
        moves = Moves()
        for piece in pieces:
            if piece.key in plan.late and piece.key not in skips:
                _add(moves, plan, piece, memory, links, flats)
        found.append(moves)
    return found


def _add(
    moves: Moves,
    plan: CapturePlan,
    piece: SlicePiece,
    memory: torch.Tensor,
    links: Links,
    flats: dict[str, torch.Tensor | None],
) -> None:
    tensor = plan.late[piece.key]
    link = link_of(tensor, links)
    if piece.key not in flats:
        flats[piece.key] = flat_bytes(tensor)
    flat = flats[piece.key]
    if flat is not None:
        size_bytes = piece.stop - piece.start
        moves.add(memory[piece.at : piece.at + size_bytes], flat[piece.start : piece.stop], link)
    elif not piece.start:
        moves.add(_whole(memory, piece.at, tensor), tensor.detach(), link)


def early_moves(plan: CapturePlan, memory: torch.Tensor, links: Links) -> Moves:
    """Return the copies of the early tensors."""
    moves = Moves()
    for key, tensor in plan.early.items():
        if not tensor.numel():
            continue
        at, link, flat = plan.starts[key], link_of(tensor, links), flat_bytes(tensor)
        if flat is None:
            moves.add(_whole(memory, at, tensor), tensor.detach(), link)
        else:
            moves.add(memory[at : at + flat.nbytes], flat, link, is_early=True)
    return moves


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of a tensor's bytes; None if they are not one run of memory in the order to be stored."""
    plain = tensor.detach()
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        return None
    return as_bytes(plain)


def _whole(memory: torch.Tensor, at: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``memory`` for ``tensor``, as a tensor of its dtype and shape."""
    size_bytes = tensor.numel() * tensor.element_size()
    return memory[at : at + size_bytes].view(tensor.dtype).view(tensor.shape)


def wait_all(issued: Sequence[Issued]) -> None:
    """Return when all copies are done."""
    for one in issued:
        one.ticket.wait()
