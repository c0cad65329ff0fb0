"""How ranks talk beside the collectives: whole objects over a socket pair that nobody else can reach.

Both ends are processes of one user, started one by the other, so pickles are safe here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashstep.ranks.faults import Faults, PeerLost

START_SILENCE_S = 60.0
"""How long a rank may be silent while it starts: importing and loading may hold a whole process up for a while."""


@dataclass(frozen=True)
class Setup:
    """What a worker is told first."""

    path: Path
    rank: int
    world: int
    device: str
    threads: int
    check: bool
    silence_s: float
    collective_s: float  # the longest that a collective may take; the step's deadline comes before
    leader_pid: int
    faults: Faults


class Channel:
    """Objects in both directions, whole and in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, value: object) -> None:
        """Send `value`. Raises `PeerLost` where the other end has gone."""
        self.send_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))

    def send_bytes(self, content: bytes) -> None:
        """Send an object that is pickled already."""
        try:
            self._socket.sendall(len(content).to_bytes(8, "little") + content)
        except OSError as error:
            raise PeerLost(str(error)) from None

    def receive(self) -> Any:
        """The next object. Raises `PeerLost` where the other end has gone."""
        return pickle.loads(self._read(int.from_bytes(self._read(8), "little")))

    def close(self) -> None:
        """Let the other end know that nothing more comes."""
        self._socket.close()

    def _read(self, count: int) -> bytearray:
        content = bytearray(count)
        view, done = memoryview(content), 0
        while done < count:
            try:
                got = self._socket.recv_into(view[done:])
            except OSError as error:
                raise PeerLost(str(error)) from None
            if not got:
                raise PeerLost("the other end has closed")
            done += got
        return content


def say(message: str) -> None:
    """Write a line to standard error; never waits for a reader that has stopped reading."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
        if select.select([], [2], [], 1.0)[1]:
            os.write(2, f"flashstep: {message}\n".encode(errors="backslashreplace"))
