"""`flashstep serve`: the process around the application. Owns the socket, signals, shutdown and what is printed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import math
import signal
import socket
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from flashstep.server.app import create_app
from flashstep.server.interface import ServerSettings, Serving, ServingEngine
from flashstep.settings import EngineConfig

if TYPE_CHECKING:  # the server itself needs no tensor library
    from flashstep.async_engine import AsyncEngine
    from flashstep.loading import LoadedModel
    from flashstep.ranks.launch import Ranks

log = logging.getLogger("flashstep.server")

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
# Behind the grace period: time for the events that tell clients of the end.
_FAREWELL_S = 5


class Server(uvicorn.Server):
    """uvicorn with our shutdown: the engine's grace period runs while connections are being closed."""

    def __init__(self, engine: ServingEngine, settings: ServerSettings, *, grace_s: float = 30.0) -> None:
        """`grace_s`: how long running requests may go on after the signal to end."""
        app = create_app(engine, settings)
        self._serving: Serving = app.state.serving
        self._grace_s = grace_s
        self._engine_ends: list[asyncio.Task[None]] = []
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",  # bounds the size of headers
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=int(grace_s) + _FAREWELL_S,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, let running ones finish or cut them off, close connections, stop the engine."""
        self._serving.closing = True
        running = self._serving.engine.stats().running
        log.info("shutting down; %d running requests have %g s to finish", running, self._grace_s)
        self._end_engine(self._grace_s)
        await super().shutdown(sockets)
        await asyncio.gather(*self._engine_ends)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the grace period, the next one ends it."""
        if self._serving.closing:
            self._end_engine(0)
        self.should_exit = True

    def _end_engine(self, grace_s: float) -> None:
        self._engine_ends.append(asyncio.get_running_loop().create_task(self._serving.engine.shutdown(grace_s)))

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """End in order, with status 0, on SIGTERM and SIGINT: uvicorn's own raises the signal again."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread only
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Raises ValueError or OSError with a message for the user; else what kept the engine
    from being built, for there is nothing to serve then."""
    _check(args)
    api_keys = (*args.api_key, *_keys_in(args.api_key_file))
    settings = ServerSettings(
        served_model_names=tuple(args.served_model_name),
        api_keys=api_keys,
        cors_origins=tuple(args.cors_origin),
        allowed_hosts=tuple(args.allowed_host) or (() if api_keys else _loopback_names(args.host)),
        max_body_bytes=parse_bytes(args.max_body, "--max-body"),
        request_timeout_s=args.request_timeout,
        step_deadline_s=args.step_deadline,
        log_requests=args.log_requests,
    )
    config = EngineConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        kv_cache_memory=parse_bytes(args.kv_cache_memory, "--kv-cache-memory"),
        enable_prefix_caching=not args.no_prefix_caching,
        prefill_schedule_interval=args.prefill_schedule_interval,
        decode_slowdown=args.decode_slowdown,
        max_queue=args.max_queue,
        num_speculative_tokens=0 if args.no_speculation else args.num_speculative_tokens,
        rule=args.rejection,
        synthetic_accepted=args.synthetic_accepted,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The socket first: a port that is taken is known before anything is loaded.
    with _listen(args.host, args.port) as listener, _ranks(args) as ranks:
        engine = _start_engine(args, config, ranks)
        server = Server(engine, settings, grace_s=args.grace)
        unbuilt: list[BaseException] = []

        def give_up(error: BaseException) -> None:
            unbuilt.append(error)
            server.should_exit = True

        engine.on_build_error(give_up)
        if ranks is not None:
            ranks.on_failure(lambda failure: setattr(server, "should_exit", True))
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.info("serving %s at http://%s:%d (API under /v1)", ", ".join(_names(engine, settings)), shown, port)
        if not settings.api_keys and not ipaddress.ip_address(host).is_loopback:
            log.warning("anyone who can reach %s port %d can use this server: give --api-key", host, port)
        if settings.log_requests:
            log.warning("bodies of requests are logged, with all that users write")
        server.run(sockets=[listener])
        if ranks is not None and ranks.failure is not None:
            raise ranks.failure
        if unbuilt:
            raise unbuilt[0]
    log.info("ended")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that cannot be, all at once; the settings of engine and server refuse the rest."""
    problems = []
    if args.model is not None and not args.model.is_dir():
        problems.append(f"MODEL {args.model}: no such directory; give one on this machine, nothing is downloaded")
    if args.no_speculation and args.num_speculative_tokens:
        problems.append("--no-speculation and --num-speculative-tokens exclude each other: give one")
    if not 0 <= args.grace < math.inf:
        problems.append(f"--grace {args.grace}: expected 0 or more seconds")
    if not 0 <= args.port < 1 << 16:
        problems.append(f"--port {args.port}: expected 0..65535")
    if args.num_layers is not None and args.load_format != "random":
        problems.append("--num-layers goes with --load-format random: a checkpoint is served whole")
    if args.load_format == "random" and args.tensor_parallel_size > 1:
        problems.append("--load-format random runs on one rank: leave --tensor-parallel-size out")
    if args.engram_placement and args.tensor_parallel_size > 1:
        problems.append("--engram-placement is for one rank so far: leave --tensor-parallel-size out")
    if args.threads is not None and args.threads < 1:
        problems.append(f"--threads {args.threads}: expected at least 1")
    if problems:
        raise ValueError("; ".join(problems))


def parse_bytes(given: str, option: str) -> int:
    """Bytes from `512MiB`, `2GiB` or a plain number. Raises ValueError."""
    digits = given.strip().rstrip("bBiIkKmMgGtT")
    unit = given.strip()[len(digits) :].lower()
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{option} {given}: expected bytes, for example 536870912, 512MiB or 2GiB") from None


def _keys_in(file: Path | None) -> list[str]:
    """Keys of a file, one a line."""
    if file is None:
        return []
    keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    keys = [key for key in keys if key]
    if not keys:
        raise ValueError(f"--api-key-file {file}: holds no key; expected one a line")
    return keys


def _loopback_names(host: str) -> tuple[str, ...]:
    """The names of loopback, where `host` is one of them; else none."""
    names = ("localhost", "127.0.0.1", "::1")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return tuple({*names, host}) if loopback else ()


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from error
    listener.listen(2048)
    return listener


def _ranks(args: argparse.Namespace) -> contextlib.AbstractContextManager[Ranks | None]:
    """The processes that share the weights; they start at once, from the thread that lives longest."""
    from flashstep.backends import choose
    from flashstep.loading import BUNDLED_MODEL
    from flashstep.ranks.launch import ranks_for

    return ranks_for(
        args.model or BUNDLED_MODEL,
        args.tensor_parallel_size,
        device=choose(args.decode_backend, args.device, world=args.tensor_parallel_size).device,
        threads=args.threads,
        check=args.check_ranks,
        step_deadline_s=args.step_deadline,
    )


def _start_engine(args: argparse.Namespace, config: EngineConfig, ranks: Ranks | None) -> AsyncEngine:
    from flashstep.async_engine import start
    from flashstep.backends import choose, load_for

    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    choice = choose(args.decode_backend, args.device, world=args.tensor_parallel_size)
    log.info("decode backend: %s on %s", choice.backend, choice.device)

    def load() -> LoadedModel:
        return load_for(
            choice,
            args.model,
            random_weights=args.load_format == "random",
            num_layers=args.num_layers,
            engram=args.engram_placement,
        )

    return start(args.model, config, load=load, ranks=ranks)


def _names(engine: ServingEngine, settings: ServerSettings) -> tuple[str, ...]:
    return settings.served_model_names or (engine.model_name,)
