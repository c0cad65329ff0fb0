"""A rank other than the leader, as a process: `python -m flashstep.ranks.worker COMMANDS PULSE`, two inherited sockets.

It watches the leader from its first moment on, joins the agreement, loads its part and repeats the leader's calls
until it is told to end. It never outlives the leader: when the leader ends, the pulse's socket closes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashstep.ranks.faults import PeerLost
from flashstep.ranks.pulse import Loss, Message, Pulse
from flashstep.ranks.wire import START_SILENCE_S, Channel, Setup, say

if TYPE_CHECKING:  # torch takes seconds to import: the watch comes first
    from flashstep.ranks.collectives import Progress

_PR_SET_PDEATHSIG = 1


class Watch:
    """Ends this process when the leader says so, dies or hangs; an end never waits for what the main thread does."""

    def __init__(self, setup: Setup, sock: socket.socket) -> None:
        self._setup = setup
        self._ending = threading.Lock()
        self.progress: Progress | None = None  # until torch is imported
        self.pulse = Pulse(
            {0: sock},
            silence_s=START_SILENCE_S,
            beat=self._beat,
            heard=self._heard,
            lost=self._lost,
            tick=lambda: None,
        )

    def strict(self) -> None:
        """From now on the leader answers soon, or not at all."""
        self.pulse.silence_s = self._setup.silence_s

    @property
    def where(self) -> str:
        """How far this rank is, in words."""
        return "before step 1" if self.progress is None else self.progress.where

    def end(self, message: str, *, report: bool = False) -> None:
        """End this process with status 1 and `message`, which with `report` also becomes that of all ranks."""
        self._ending.acquire()  # for good: the message is said once
        if report:
            self.pulse.send(0, {"failed": message})
        if message:
            say(f"rank {self._setup.rank}: {message}")
        os._exit(1)

    def _beat(self) -> Message:
        progress = self.progress
        return {"beat": [0, 0] if progress is None else [progress.step, progress.collective]}

    def _heard(self, leader: int, message: Message) -> None:
        if "stop" in message:
            self.end(message["stop"])

    def _lost(self, leader: int, how: Loss) -> None:
        if how is Loss.SILENT:
            message = f"rank 0 has been silent for {self.pulse.silence_s:g} s {self.where}: it is stopped or hangs"
            if os.getppid() == self._setup.leader_pid:  # it cannot end by itself, and would keep memory and ports
                os.kill(self._setup.leader_pid, signal.SIGKILL)
        else:
            message = f"rank 0 died {self.where}"
        self.end(message)


def main(arguments: Sequence[str]) -> None:
    """Run as a rank; ends the process."""
    commands, pulse = (socket.socket(fileno=int(argument)) for argument in arguments)
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group: the leader decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # A rank that is stopped (SIGSTOP) cannot see the leader's socket close: the leader's death wakes it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    channel = Channel(commands)
    try:
        setup: Setup = channel.receive()
    except PeerLost:
        os._exit(1)
    watch = Watch(setup, pulse)
    watch.pulse.start()
    try:
        _serve(setup, channel, watch)
    except PeerLost as error:  # the watch ends this process; if it sees no reason to, there is one all the same
        time.sleep(setup.silence_s + 2)
        watch.end(f"lost the other ranks {watch.where}: {error}", report=True)
    except BaseException as error:
        watch.end(f"rank {setup.rank} failed {watch.where}: {type(error).__name__}: {error}", report=True)
    os._exit(0)  # without the interpreter's farewell: threads of gloo are still there


def _serve(setup: Setup, channel: Channel, watch: Watch) -> None:
    import torch

    from flashstep.ranks import agreement
    from flashstep.ranks.collectives import Group, Progress, meet
    from flashstep.ranks.follower import Follower
    from flashstep.ranks.sharded import ShardedDraft, ShardedModel, read_shard

    torch.set_num_threads(setup.threads)
    rank, world, faults = setup.rank, setup.world, setup.faults
    path = faults.weights.get(rank, setup.path)
    channel.send(agreement.report(path, rank, world, setup.device, setup.threads, faults.missing.get(rank)))
    channel.receive()  # to go on: where the ranks cannot, the watch hears so
    port, token_map = channel.receive()
    watch.progress = Progress()
    gloo = meet(rank, world, port, setup.collective_s)
    group = Group(rank, world, gloo, watch.progress, setup.check, faults)
    with torch.inference_mode():
        try:
            model, draft = read_shard(path, token_map, group, setup.device, ShardedModel, ShardedDraft)
        except (ValueError, OSError) as error:
            channel.send(f"rank {rank}: {error}")
        else:
            channel.send(None)
        channel.receive()
        follower = Follower(model, draft)
        while True:
            name, args = channel.receive()
            watch.strict()
            if name == "end":
                return
            watch.progress.begin(step=name == "forward")
            follower.run(name, args)
            watch.progress.end()


if __name__ == "__main__":
    main(sys.argv[1:])
