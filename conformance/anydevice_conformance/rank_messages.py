"""The forms in which ranks send messages to each other."""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist

from anydevice_conformance.rank_form import Form, Place, Tensors

__all__ = ["MESSAGES"]


def _messages(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    """Messages to the next rank, and as many from the one before; odd ranks receive first."""
    group, size, rank = place.members.group, place.members.size, place.members.rank
    came = [place.room(one) for one in mine]
    to, source = place.rooted("dst", (rank + 1) % size), place.rooted("src", (rank - 1) % size)
    works: list[Any] = []

    def send() -> None:
        for number, one in enumerate(mine):
            tag = (place.seed + number) % 5
            if place.handle:
                works.append(dist.isend(one, group=group, tag=tag, **to))
            else:
                dist.send(one, group=group, tag=tag, **to)

    def receive() -> None:
        for number, one in enumerate(came):
            tag = (place.seed + number) % 5
            if place.handle:
                works.append(dist.irecv(one, group=group, tag=tag, **source))
            else:
                told = dist.recv(one, group=group, tag=tag, **source)
                wanted = place.members.ranks[(rank - 1) % size]
                assert told in (wanted, (rank - 1) % size), f"recv from {wanted} returned {told}"

    for step in (receive, send) if rank % 2 else (send, receive):
        step()
    return works, came


def _batch(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    """As `_messages`, in one batch."""
    group, size, rank = place.members.group, place.members.size, place.members.rank
    came = [place.room(one) for one in mine]
    to, source = (place.members.ranks[(rank + by) % size] for by in (1, -1))
    sent = [dist.P2POp(dist.isend, one, to, group) for one in mine]
    received = [dist.P2POp(dist.irecv, one, source, group) for one in came]
    works = list(dist.batch_isend_irecv(received + sent if rank % 2 else sent + received))
    if not place.handle:  # it always gives handles
        for work in works:
            work.wait()
    return works, came


def _from_before(place: Place, all_: list[Tensors]) -> Tensors:
    return all_[(place.members.rank - 1) % place.members.size]


#: Name to form.
MESSAGES: Final = {
    "messages": Form(
        _messages, _from_before, tensors=lambda size: 3, rare=(), paired=True, needed=True
    ),
    "a batch of messages": Form(_batch, _from_before, tensors=lambda size: 2, rare=(), paired=True),
}
