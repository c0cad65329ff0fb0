"""Starts the other ranks, agrees with them, announces calls, watches, and ends them: the leader's side.

Workers are children of this process over two socket pairs each, made before they start: one for objects in order
(agreement, then calls), one for the pulse. Only gloo meets over a port, which is bound before anyone is told of it.

Whatever happens, all ranks end together. A rank that dies closes its pulse; one that is stopped falls silent; one
that lives but does not get on misses the step's deadline; one that computes something else is found by comparison.
The leader then tells the others, and kills those who do not end at once. If the leader itself dies, its sockets
close; if it is stopped, a worker kills it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashstep.chat import Tokenizer
from flashstep.checkpoint import Progress as LoadProgress
from flashstep.config import ModelConfig
from flashstep.engine import Engine
from flashstep.layout import check_world
from flashstep.loading import LoadedModel, token_map
from flashstep.ranks import agreement
from flashstep.ranks.collectives import Group, Progress, listen, meet, ranks_named
from flashstep.ranks.faults import AgreementError, Faults, PeerLost, RankFailure
from flashstep.ranks.leader import LeadingDraft, LeadingModel, RankedEngine
from flashstep.ranks.pulse import TICK_S, Loss, Message, Pulse
from flashstep.ranks.sharded import placed, read_shard
from flashstep.ranks.wire import START_SILENCE_S, Channel, Setup, say
from flashstep.settings import EngineConfig
from flashstep.state import State

# How long ranks get to end by themselves: when told of a failure, and when all is well.
_FAREWELL_S = 1.0
_END_S = 5.0
# How long this process may stay in a call after a failure. Then nothing but its end will free it.
_STUCK_S = 5.0


class Ranks:
    """`world` ranks over one model directory, of which this process is rank 0. Use it in a `with` block, or `close` it.

    `device` is `cpu`, or `cuda` for GPU r on rank r. `threads` are CPU threads of each rank (default: torch's number,
    shared out); this process gets them too. `check` compares every router and index choice and every token in each
    step; without it what leaves the model is compared. A rank that is silent for `silence_s` is taken for lost, a
    step that takes longer than `step_deadline_s` for stuck. `faults` breaks things for tests.
    """

    def __init__(
        self,
        path: Path | str,
        world: int,
        *,
        device: str = "cpu",
        threads: int | None = None,
        check: bool = False,
        silence_s: float = 5.0,
        step_deadline_s: float = 60.0,
        faults: Faults | None = None,
    ) -> None:
        """Start the other ranks. Raises ValueError where model or machine do not allow so many."""
        self.path, self.world = Path(path), world
        check_world(ModelConfig.from_file(self.path), world)
        self._device = _device_of(device, world)
        self._threads = threads or max(1, torch.get_num_threads() // world)
        self._check, self._faults = check, faults or Faults()
        self._silence_s, self._deadline_s = silence_s, step_deadline_s
        self.progress = Progress()
        self.state: State | None = None
        self._watched_call = 0
        self._call_ticks, self._failed_ticks = 0, 0  # in the call that runs; in a call since a failure
        self._progress_of: dict[int, tuple[int, int]] = {}
        self._failing = threading.Lock()
        self._failed = threading.Event()
        self._failure: str | None = None
        self._on_failure: list[Callable[[RankFailure], None]] = []
        self._closed = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, Channel] = {}
        pulses: dict[int, socket.socket] = {}
        try:
            for rank in range(1, world):
                pulses[rank] = self._start(rank)
        except BaseException as error:
            for process in self._processes.values():
                process.kill()
                process.wait()
            if isinstance(error, PeerLost):
                raise RankFailure(f"rank {max(self._processes)} died as soon as it was started") from None
            raise
        self._pulse = Pulse(
            pulses, silence_s=START_SILENCE_S, beat=dict, heard=self._heard, lost=self._lost, tick=self._tick
        )
        self._pulse.start()
        atexit.register(self.close)

    def _start(self, rank: int) -> socket.socket:
        """Start the process of `rank`; returns this end of its pulse."""
        commands, their_commands = socket.socketpair()
        pulse, their_pulse = socket.socketpair()
        with their_commands, their_pulse:
            theirs = (their_commands.fileno(), their_pulse.fileno())
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "flashstep.ranks.worker", *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,  # ours is for the answer
                pass_fds=theirs,
            )
        self._channels[rank] = Channel(commands)
        self._channels[rank].send(
            Setup(
                self.path,
                rank,
                self.world,
                self._device(rank),
                self._threads,
                self._check,
                self._silence_s,
                2 * self._deadline_s + 10,
                os.getpid(),
                self._faults,
            )
        )
        return pulse

    # -- using ----------------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [os.getpid(), *(process.pid for process in self._processes.values())]

    @property
    def failure(self) -> RankFailure | None:
        """Why the ranks have ended, if they have by a failure."""
        return None if self._failure is None else RankFailure(self._failure)

    def on_failure(self, call: Callable[[RankFailure], None]) -> None:
        """Have `call` told of a failure, on whatever thread notices it, when the other ranks are gone."""
        with self._failing:
            if self._failure is None:
                self._on_failure.append(call)
                return
        call(RankFailure(self._failure))

    def load(self, progress: LoadProgress | None = None) -> LoadedModel:
        """Agree with the other ranks and load everybody's part.

        Raises `AgreementError`, with which all ranks fail, and what `loading.load` raises for this rank's part.
        """
        torch.set_num_threads(self._threads)
        self.progress.begin()
        try:
            return self._load(progress)
        except PeerLost as error:
            raise self._diagnosis(error) from None
        except RankFailure:
            raise
        except BaseException as error:
            self._fail(f"rank 0 cannot start: {error}", quiet=isinstance(error, KeyboardInterrupt))
            raise
        finally:
            self.progress.end()

    def _load(self, progress: LoadProgress | None) -> LoadedModel:
        device = self._device(0)
        path = self._faults.weights.get(0, self.path)
        own = agreement.report(path, 0, self.world, device, self._threads, self._faults.missing.get(0))
        refused = agreement.compare([own, *(channel.receive() for channel in self._channels.values())])
        self._tell_verdict(refused)

        config, tokenizer = ModelConfig.from_file(path), Tokenizer.load(path)
        compressed = token_map(path, config)
        listener = listen()
        port = listener.getsockname()[1]
        for channel in self._channels.values():
            channel.send((port, compressed))
        gloo = meet(0, self.world, port, 2 * self._deadline_s + 10, listener)
        group = Group(0, self.world, gloo, self.progress, self._check, self._faults)

        def reading(name: str, done: int, total: int) -> None:
            self._raise_failure()
            if progress is not None:
                progress(name, done, total)

        model, draft = read_shard(
            path, compressed, group, device, partial(LeadingModel, self), partial(LeadingDraft, self), reading
        )
        errors = [channel.receive() for channel in self._channels.values()]
        self._tell_verdict(agreement.refusal(self.world, [error for error in errors if error is not None]))
        return LoadedModel(path, config, tokenizer, model, draft)

    def _tell_verdict(self, refused: AgreementError | None) -> None:
        """Let the other ranks go on, or all fail with `refused`."""
        if refused is not None:
            self._fail(str(refused))
            raise refused
        for channel in self._channels.values():
            channel.send("go on")

    def engine(self, config: EngineConfig | None = None, progress: LoadProgress | None = None) -> Engine:
        """Load, and make an engine over all ranks. Raises as `load` and `Engine`."""
        return RankedEngine(self.load(progress), config or EngineConfig(), self)

    @contextlib.contextmanager
    def call(self, name: str, *args: Any, step: bool = False) -> Iterator[None]:
        """Have every other rank run `name` with `args` while this one runs the body; `step` begins a new step.

        A call inside a call is part of it and not announced. Raises `RankFailure` where a rank is lost or differs. A
        call that fails here leaves the others in the middle of it: it ends all ranks, whatever the error was.
        """
        if self.progress.busy:
            yield
            return
        self._raise_failure()
        self._pulse.silence_s = self._silence_s
        content = pickle.dumps((name, [placed(arg, "cpu") for arg in args]), protocol=pickle.HIGHEST_PROTOCOL)
        self.progress.begin(step=step)
        try:
            for channel in self._channels.values():
                channel.send_bytes(content)
            yield
        except PeerLost as error:
            raise self._diagnosis(error) from None
        except RankFailure as failure:
            self._fail(str(failure))
            raise
        except BaseException as error:
            message = f"rank 0 failed {self.progress.where}: {type(error).__name__}: {error}"
            self._fail(message, quiet=isinstance(error, KeyboardInterrupt))
            raise
        finally:
            self.progress.end()

    # -- ending ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Ranks:
        """The ranks themselves."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End the other ranks and wait for their processes; does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._failure is None:
            for rank, channel in self._channels.items():
                if self.progress.busy or not self.progress.calls:  # it does not listen for calls now
                    self._pulse.send(rank, {"stop": ""})
                else:
                    with contextlib.suppress(PeerLost):
                        channel.send(("end", ()))
        self._end_processes(_END_S)
        self._pulse.stop()
        self._pulse.close()
        for channel in self._channels.values():
            channel.close()

    def _end_processes(self, patience_s: float) -> None:
        """Wait for the workers' ends, then enforce them."""
        end = time.monotonic() + patience_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # also ends what is stopped
                process.wait()

    # -- failing --------------------------------------------------------------------------------------------------

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RankFailure(self._failure)
        if self._closed:
            raise RankFailure("the ranks have been closed")

    def _fail(self, message: str, *, quiet: bool = False) -> None:
        """End the other ranks with `message`, which they say unless `quiet`; nothing where they are ending already."""
        with self._failing:
            if self._failure is not None or self._closed:
                return
            self._failure = message
            for rank in self._processes:
                self._pulse.send(rank, {"stop": "" if quiet else message})
            self._end_processes(_FAREWELL_S)
            self._failed.set()
            calls = list(self._on_failure)
        for call in calls:
            call(RankFailure(message))

    def _diagnosis(self, error: PeerLost) -> RankFailure:
        """Why a connection has ended: the watch finds out by itself, from another socket."""
        if not self._failed.wait(self._silence_s + 2):
            self._fail(f"rank 0 lost the other ranks {self.progress.where}: {error}")
        return RankFailure(self._failure)

    # -- watching: on the thread of the pulse -------------------------------------------------------------------------

    def _heard(self, rank: int, message: Message) -> None:
        if "failed" in message:
            self._fail(message["failed"])
        elif "beat" in message:
            step, collective = message["beat"]
            self._progress_of[rank] = step, collective

    def _lost(self, rank: int, how: Loss) -> None:
        if how is Loss.SILENT:
            what = f"has been silent for {self._pulse.silence_s:g} s {self.progress.where}: it is stopped or hangs"
        else:
            try:
                what = f"died {self.progress.where} ({_end_of(self._processes[rank].wait(_FAREWELL_S))})"
            except subprocess.TimeoutExpired:
                what = f"closed its connection {self.progress.where}"
        self._fail(f"rank {rank} {what}")

    def _tick(self) -> None:
        """Count the ticks of a call: against the deadline, and after a failure against our patience."""
        progress = self.progress
        if self._failed.is_set():
            self._failed_ticks = self._failed_ticks + 1 if progress.busy else 0
            if self._failed_ticks * TICK_S > _STUCK_S:
                say(f"error: {self._failure}")
                os._exit(1)
            return
        self._call_ticks = self._call_ticks + 1 if progress.busy and progress.calls == self._watched_call else 0
        self._watched_call = progress.calls
        if progress.step and self._call_ticks * TICK_S > self._deadline_s:
            self._fail(self._hung())

    def _hung(self) -> str:
        """Who keeps the others waiting: the rank that has entered the fewest collectives."""
        places = {0: (self.progress.step, self.progress.collective), **self._progress_of}
        behind = [rank for rank, place in sorted(places.items()) if place == min(places.values())]
        rest = [rank for rank in range(self.world) if rank not in behind]
        start = f"step {self.progress.step} has taken more than {self._deadline_s:g} s"
        if not rest:
            return f"{start}: no rank gets on"
        hang, wait = "hangs" if len(behind) == 1 else "hang", "waits" if len(rest) == 1 else "wait"
        return f"{start}: {ranks_named(behind)} {hang}, {ranks_named(rest)} {wait}"


def ranks_for(
    path: Path | str,
    world: int,
    *,
    device: str = "cpu",
    threads: int | None = None,
    check: bool = False,
    step_deadline_s: float = 60.0,
) -> contextlib.AbstractContextManager[Ranks | None]:
    """`Ranks` for `world` above 1, for 1 None: this process is then all there is. Raises as `Ranks`."""
    if world == 1 and not check:
        return contextlib.nullcontext()
    if world == 1:
        raise ValueError("--check-ranks compares ranks: it needs --tensor-parallel-size 2 or more")
    return Ranks(path, world, device=device, threads=threads, check=check, step_deadline_s=step_deadline_s)


def _device_of(device: str, world: int) -> Callable[[int], str]:
    """Each rank's torch device. Raises ValueError where there are too few."""
    if device == "cpu":
        return lambda rank: "cpu"
    if device != "cuda":
        raise ValueError(f"device {device}: tensor parallelism takes cpu, or cuda for one GPU per rank")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < world:
        raise ValueError(
            f"tensor parallelism over {world} ranks needs {world} GPUs, torch sees {count}: take fewer ranks "
            "(--tensor-parallel-size), or let CUDA_VISIBLE_DEVICES name more GPUs; `flashstep doctor` says what "
            "this machine has"
        )
    return lambda rank: f"cuda:{rank}"


def _end_of(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
