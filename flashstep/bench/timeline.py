"""A picture of one layer's kernels on the device, as HTML: when each starts and ends, and the gaps between them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from flashstep.jit import Launch

_WIDTH, _ROW = 1400, 22
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


class KernelTime(NamedTuple):
    """A kernel of one replay; microseconds on the device's clock."""

    name: str
    start: float
    end: float


def kernel_times(graph: torch.cuda.CUDAGraph) -> list[KernelTime]:
    """Every kernel of one replay, in order of their ends, which is the order of a dependent chain."""
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    found = [
        KernelTime(event.name.split("(")[0], event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel.end)


def write_timeline(path: Path, launches: Sequence[Launch], graph: torch.cuda.CUDAGraph, *, layers: int = 2) -> None:
    """Draw the kernels of the middle `layers` layers of a replay of `graph`, which runs `launches`."""
    names = {launch.name for launch in launches}
    times = [kernel for kernel in kernel_times(graph) if kernel.name in names]
    layer_starts = [i for i, (name, _, _) in enumerate(times) if name.startswith(("experts", "gate_up"))]
    middle = len(layer_starts) // 2
    shown = times[layer_starts[middle] + 1 : layer_starts[min(middle + layers, len(layer_starts) - 1)] + 2]
    path.write_text(_draw(shown))


def _draw(kernels: Sequence[KernelTime]) -> str:
    first, last = min(start for _, start, _ in kernels), max(end for _, _, end in kernels)
    scale = (_WIDTH - 40) / (last - first)
    colours = {
        name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(dict.fromkeys(name for name, _, _ in kernels))
    }
    bars, busy_until = [], first
    for row, (name, start, end) in enumerate(kernels):
        x, width, y = 20 + (start - first) * scale, max(1.0, (end - start) * scale), 30 + row * _ROW
        gap = start - busy_until
        busy_until = max(busy_until, end)
        label = f"{name} {end - start:.2f} us" + (f", gap {gap:.2f} us" if gap > 0 else "")
        bars.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" fill="{colours[name]}"/>'
            f'<text x="{min(x + width + 4, _WIDTH - 260):.1f}" y="{y + 13}">{html.escape(label)}</text>'
        )
    height = 50 + len(kernels) * _ROW
    title = f"{len(kernels)} kernels in {last - first:.1f} us (start to end on the device)"
    return (
        '<!doctype html><meta charset="utf-8"><title>flashstep: a layer on the device</title>'
        "<style>body{font:13px sans-serif}text{font-size:11px}</style>"
        f'<h3>{title}</h3><svg width="{_WIDTH}" height="{height}">{"".join(bars)}</svg>\n'
    )
