"""Collectives of the reference over gloo, and the comparison of what ranks must have in common.

Sums add the ranks' parts in rank order on the leader, which sends the result to all: every rank gets the same bits.
In float64, as the reference computes, so that the sum is that of one rank to the last bit or nearly so, and rounds
like it. Slow and innocent: the fast path exchanges partial sums inside its kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashstep.ranks.faults import Faults, PeerLost, RankFailure

LOOPBACK = "127.0.0.1"

# What forwards trace, by the last part of the name, and how messages call it.
_CHOICES = {"index_sel": "index choice", "candidates": "index candidates"}


@dataclass
class Progress:
    """How far this rank is; written by the thread that computes, read by the one that watches."""

    step: int = 0  # forwards begun
    collective: int = 0  # collectives entered in this step
    calls: int = 0  # begun, forwards among them
    busy: bool = False  # whether a call is running

    def begin(self, *, step: bool = False) -> None:
        """A call begins; with `step`, a new step with it."""
        if step:
            self.step, self.collective = self.step + 1, 0
        self.calls += 1
        self.busy = True

    def end(self) -> None:
        """The call has ended."""
        self.busy = False

    @property
    def where(self) -> str:
        """The place in words, for messages."""
        if not self.step:
            return "before step 1"
        return f"{'in' if self.busy else 'after'} step {self.step}"


@dataclass
class Group:
    """This rank among the others: sums, gathers, broadcasts, and notes that must be equal everywhere.

    Collectives raise `PeerLost` where another rank has gone. Tensors may be on any device; they travel through the
    host.
    """

    rank: int
    world: int
    gloo: Any  # a ProcessGroupGloo: what it can do is not in torch's annotations
    progress: Progress
    check: bool = False  # compare every choice, not only what leaves the model
    faults: Faults = field(default_factory=Faults)
    _notes: list[tuple[str, int]] = field(init=False, default_factory=list)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of every rank's `partial`, added in rank order; equal bits on all ranks."""
        if not partial.numel():  # on all ranks alike: there are no rows
            return partial
        parts = self._gather(partial)
        total = parts[0] if parts else torch.empty(partial.shape, dtype=partial.dtype)
        for part in parts[1:]:
            total = total + part
        total = self.broadcast(total)
        if self.faults.corrupt_sums == (self.rank, self.progress.step):
            total.neg_()
        return total.to(partial.device)

    def gather(self, part: Tensor) -> Tensor:
        """The ranks' parts side by side in the last dimension, on rank 0; elsewhere `part` itself."""
        parts = self._gather(part)
        return torch.cat(parts, dim=-1).to(part.device) if parts else part

    def broadcast(self, value: Tensor) -> Tensor:
        """Rank 0's `value`; elsewhere a tensor like it, whose content does not count, is given and overwritten."""
        host = value.cpu().contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self._talking():
            self.gloo.broadcast([host], options).wait()
        return host.to(value.device)

    # -- what ranks must have in common ---------------------------------------------------------------------------

    def note(self, name: str, value: Tensor, *, always: bool = False) -> None:
        """Remember the bits of `value` for the next `agree`; without `always` only where choices are checked."""
        if always or self.check:
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            digest = hashlib.blake2b(content, digest_size=8).digest()
            self._notes.append((name, int.from_bytes(digest, "little", signed=True)))

    def traced(self, trace: Callable[[str, Tensor], None]) -> Callable[[str, Tensor], None]:
        """`trace`, which on the way also notes the choices that a forward shows."""
        if not self.check:
            return trace

        def noting(name: str, value: Tensor) -> None:
            layer, _, kind = name.rpartition(".")
            if kind in _CHOICES:
                self.note(f"{_CHOICES[kind]} of {layer.replace('.', ' ')}", value)
            trace(name, value)

        return noting

    def agree(self) -> None:
        """Compare what was noted since the last time. Raises `RankFailure` on rank 0 where ranks differ.

        The first difference in the order of computing is named: what follows it, follows from it.
        """
        notes, self._notes = self._notes, []
        found = self._gather(torch.tensor([digest for _, digest in notes], dtype=torch.int64))
        for place, (name, _) in enumerate(notes):
            holders: dict[int, list[int]] = {}
            for rank, digests in enumerate(found):
                holders.setdefault(int(digests[place]), []).append(rank)
            if len(holders) > 1:
                odd = min(holders.values(), key=lambda ranks: (len(ranks), 0 in ranks))
                rest = [rank for rank in range(self.world) if rank not in odd]
                verb = "differs" if len(odd) == 1 else "differ"
                raise RankFailure(
                    f"{ranks_named(odd)} {verb} from {ranks_named(rest)} in step {self.progress.step}: {name}"
                )

    # -- gloo -----------------------------------------------------------------------------------------------------

    def _gather(self, value: Tensor) -> list[Tensor]:
        """Every rank's `value` on rank 0, on the host; an empty list elsewhere."""
        host = value.detach().cpu().contiguous()
        parts = [torch.empty_like(host) for _ in range(self.world)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        with self._talking():
            self.gloo.gather([parts] if parts else [], [host], options).wait()
        return parts

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        self.progress.collective += 1
        if self.faults.hang == (self.rank, self.progress.step):
            self.progress.collective -= 1
            while True:
                time.sleep(1)
        try:
            yield
        except RuntimeError as error:  # whatever gloo has to say, a connection has ended
            raise PeerLost(str(error)) from None


def ranks_named(ranks: list[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def listen() -> socket.socket:
    """A socket for the ranks' meeting point; it is bound already, so that nobody can take the port in between."""
    listener = socket.create_server((LOOPBACK, 0))
    listener.setblocking(True)
    return listener


def meet(rank: int, world: int, port: int, timeout_s: float, listener: socket.socket | None = None) -> Any:
    """A ProcessGroupGloo of all ranks, over loopback. Rank 0 gives its `listener`, whose port the others were told."""
    timeout = timedelta(seconds=timeout_s)
    if listener is not None:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, port, None, False, timeout, wait_for_workers=False
        )
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    try:
        return dist.ProcessGroupGloo(store, rank, world, options)
    except RuntimeError as error:
        raise PeerLost(str(error)) from None
