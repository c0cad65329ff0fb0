"""Times of CUDA graphs: replayed in turns, measured by events on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_READ_BYTES = 4 << 30  # many times the L2, so that the read ceiling is memory's


def capture(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The graph of what `run` launches on the current stream; it has run once before, so that everything is loaded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def interleaved_ms(
    graphs: Mapping[str, torch.cuda.CUDAGraph], *, replays: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of `replays` replays of each graph, taken A B B A so that a drift of the clocks meets all alike."""
    for graph in graphs.values():
        for _ in range(warm_up):
            graph.replay()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    order = list(graphs)
    for turn in range(replays):
        for name in order if turn % 2 == 0 else reversed(order):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end))
    return samples


def read_ceiling_tb_s(replays: int = 10) -> float:
    """TB/s at which this device reads memory: the best of a plain sum over 4 GiB, the ceiling of any step."""
    data = torch.ones(_READ_BYTES // 4, dtype=torch.int32, device="cuda")
    graph = capture(lambda: torch.sum(data, dtype=torch.int32))
    ms = interleaved_ms({"read": graph}, replays=replays)["read"]
    return _READ_BYTES / min(ms) / 1e9
