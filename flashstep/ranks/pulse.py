"""Heartbeats: a thread that tells peers that this process lives, and notices when one of them does not.

Independent of steps and of Python's main thread. Silence is counted in this thread's own ticks, not in seconds of the
clock, so that a pause of the whole machine, or of all ranks together (Ctrl-Z), is nobody's fault.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

TICK_S = 0.25

Message = dict[str, Any]


class Loss(Enum):
    """How a peer was lost."""

    GONE = "gone"  # its end of the socket is closed: the process has ended
    SILENT = "silent"  # it exists, but nothing has come for too long


@dataclass
class _Peer:
    socket: socket.socket
    received: bytes = b""
    silent_ticks: int = 0
    given_up: bool = False


class Pulse:
    """One socket per peer; callbacks run on the thread of the pulse.

    `beat` gives what every heartbeat carries, `heard` gets messages (also heartbeats), `lost` is told of each peer at
    most once, `tick` is called after each beat. `silence_s` may be changed at any time.
    """

    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        *,
        silence_s: float,
        beat: Callable[[], Message],
        heard: Callable[[int, Message], None],
        lost: Callable[[int, Loss], None],
        tick: Callable[[], None],
    ) -> None:
        self.silence_s = silence_s
        self._peers = {rank: _Peer(sock) for rank, sock in peers.items()}
        self._beat, self._heard, self._lost, self._tick = beat, heard, lost, tick
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashstep-pulse", daemon=True)
        for peer in self._peers.values():
            peer.socket.setblocking(False)

    def start(self) -> None:
        """Begin to beat and to listen."""
        self._thread.start()

    def send(self, rank: int, message: Message) -> None:
        """Send `message` to a peer, from any thread; it is dropped where the peer cannot take it."""
        with self._sending, contextlib.suppress(OSError):
            self._peers[rank].socket.send(json.dumps(message).encode() + b"\n")

    def stop(self) -> None:
        """End the thread, from any thread."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(4 * TICK_S)

    def close(self) -> None:
        """Close the sockets, after `stop`."""
        for peer in self._peers.values():
            peer.socket.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer.socket, selectors.EVENT_READ, rank)
            next_tick = time.monotonic()
            while not self._ended.is_set():
                ready = selector.select(max(0.0, next_tick - time.monotonic()))
                for key, _ in ready:
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        self._lost(key.data, Loss.GONE)
                if time.monotonic() >= next_tick and not self._ended.is_set():
                    next_tick = time.monotonic() + TICK_S
                    self._beat_once({key.data for key in selector.get_map().values()})
                    self._tick()

    def _beat_once(self, present: set[int]) -> None:
        message = self._beat()
        for rank in sorted(present):
            self.send(rank, message)
            peer = self._peers[rank]
            peer.silent_ticks += 1
            if peer.silent_ticks * TICK_S > self.silence_s and not peer.given_up:
                peer.given_up = True
                self._lost(rank, Loss.SILENT)

    def _read(self, rank: int) -> bool:
        """Take what a peer has sent; False where it has gone."""
        peer = self._peers[rank]
        try:
            content = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            content = b""
        peer.silent_ticks = 0
        *lines, peer.received = (peer.received + content).split(b"\n")
        for line in lines:
            self._heard(rank, json.loads(line))
        return bool(content)
