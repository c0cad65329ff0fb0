"""What requests own between forwards: window rings, open groups, compressed pages, index keys, Engram history.

All tensors are allocated once. A request has a slot (rings, indexed by position modulo their length) and pages
(compressed entries, shared by all KV sources: a page covers `page_tokens` positions of every source). Only a
position decides what is visible, so rolling back is nothing but forgetting the rejected positions: a later row
writes over what a rejected row wrote, and rings are long enough that no rejected row has displaced a live entry.

For the prefix cache a page also keeps the window entries of its positions, of all layers. Page borders are multiples
of every ratio, so no group is open there: entries, windows and the last token ids are the whole state, and a request
that starts behind shared pages continues exactly as one that computed them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.pages import OutOfPages, PagePool

# What a cache keeps for a position or an entry; it decides the number format of a state that packs its values.
Kind = Literal["window", "kv", "index key"]
# A tensor, or anything that is indexed and assigned like one: `PackedValues` encodes and decodes on the way.
Store = Any


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one request in a forward: rows `first`..`end` - 1 of the batch."""

    slot: int
    start: int  # position of the first row
    first: int
    end: int


@dataclass(frozen=True)
class Rows:
    """The tokens of one forward, request after request."""

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, Sequence[int]]], device: torch.device | str = "cpu") -> Rows:
        """Rows of several requests, each given as (slot, position of its first token, tokens)."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans = []
        for slot, start, ids in parts:
            spans.append(Span(slot, start, len(tokens), len(tokens) + len(ids)))
            tokens.extend(ids)
            positions.extend(range(start, start + len(ids)))
            slots.extend([slot] * len(ids))

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(tensor(tokens), tensor(positions), tensor(slots), tuple(spans))


def upload(values: Sequence[int], to: Tensor) -> None:
    """Write `values` into `to`, in the order of the current stream, which the host does not wait for."""
    staged = torch.tensor(values, dtype=to.dtype)
    to.copy_(staged.pin_memory() if to.is_cuda else staged, non_blocking=True)


class State:
    """Caches of up to `num_slots` requests.

    `rows_per_request` bounds the rows of one request that rings hold beside a window, so that rows of one forward never
    displace an entry which another row of it still sees, accepted or not. `chunk_rows` bounds the rows of one request
    in one forward, and is the same number for implementations that read the rows of a forward out of the rings. Those
    that do not may take longer chunks; the rings then keep their ends, and `begin_chunk`, `save_rows` put into pages
    what `save_windows` will not find in the rings.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int = 1,
        num_pages: int | None = None,
        page_tokens: int = 128,
        rows_per_request: int = 512,
        chunk_rows: int | None = None,
        max_model_len: int | None = None,
        keep_windows: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        """`keep_windows` gives pages room for window entries (`save_windows`, `attach`).

        `chunk_rows`: as many as `rows_per_request` where None.
        """
        ratios = {layer: config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
        if page_tokens % math.lcm(1, *ratios.values()):
            raise ValueError(f"page_tokens = {page_tokens}: expected a multiple of every ratio in {ratios}")
        self.config = config
        self.page_tokens = page_tokens
        self.rows_per_request = rows_per_request
        self.chunk_rows = rows_per_request if chunk_rows is None else chunk_rows
        self.max_model_len = config.max_position_embeddings if max_model_len is None else max_model_len
        self.device = torch.device(device)
        self.ring = max(config.sliding_window, page_tokens) + rows_per_request
        pages_per_slot = -(-self.max_model_len // page_tokens)
        num_pages = num_slots * pages_per_slot if num_pages is None else num_pages

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        layers, dim = config.num_hidden_layers, config.head_dim
        self.window = self._store("window", layers, num_slots, self.ring, dtype=dtype)
        self.draft_window = self._store("window", config.num_nextn_predict_layers, num_slots, self.ring, dtype=dtype)
        self.history = zeros(num_slots, self.ring, dtype=torch.int32)  # compressed token ids
        self.raw = {
            layer: zeros(num_slots, self.ring, 1 if ratio == 1 else 2, dim, dtype=torch.float32)
            for layer, ratio in ratios.items()
        }
        self.kv = {
            layer: self._store("kv", num_pages, page_tokens // ratio, dtype=dtype) for layer, ratio in ratios.items()
        }
        self.index_keys = {
            layer: self._store("index key", num_pages, page_tokens // ratio, dtype=dtype)
            for layer, ratio in ratios.items()
        }
        self.keeps_windows = keep_windows
        windows = layers + config.num_nextn_predict_layers if keep_windows else 0
        self.page_windows = self._store("window", windows, num_pages, page_tokens, dtype=dtype)
        self.page_table = zeros(num_slots, pages_per_slot, dtype=torch.int32)
        self.pool = PagePool(num_pages)
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._ring_starts = [0] * num_slots  # the first position that the rings hold, where a long chunk has run
        self._free_slots = list(range(num_slots))[::-1]

    def _store(self, kind: Kind, *shape: int, dtype: torch.dtype) -> Store:
        """Room for values [*shape, width of the kind]; this state holds them decoded."""
        return torch.zeros(*shape, self.width(self.config, kind), dtype=dtype, device=self.device)

    # -- owning ---------------------------------------------------------------------------------------------------

    @staticmethod
    def width(config: ModelConfig, kind: Kind) -> int:
        """Columns of one value of a kind."""
        return config.index_head_dim if kind == "index key" else config.head_dim

    @classmethod
    def value_bytes(cls, config: ModelConfig, kind: Kind, dtype: torch.dtype) -> int:
        """Bytes of one value of a kind in this state."""
        return cls.width(config, kind) * dtype.itemsize

    @classmethod
    def page_bytes(cls, config: ModelConfig, page_tokens: int, *, keep_windows: bool, dtype: torch.dtype) -> int:
        """Bytes of one page in this state."""
        entry = cls.value_bytes(config, "kv", dtype) + cls.value_bytes(config, "index key", dtype)
        nbytes = sum(page_tokens // config.compress_ratios[layer] * entry for layer in config.kv_source_layer_ids)
        if keep_windows:
            layers = config.num_hidden_layers + config.num_nextn_predict_layers
            nbytes += layers * page_tokens * cls.value_bytes(config, "window", dtype)
        return nbytes

    @classmethod
    def slot_bytes(cls, config: ModelConfig, page_tokens: int, rows_per_request: int, *, dtype: torch.dtype) -> int:
        """Bytes of one request's rings in this state: windows, raw rows of open groups, history."""
        layers = config.num_hidden_layers + config.num_nextn_predict_layers
        raw = sum(1 if config.compress_ratios[layer] == 1 else 2 for layer in config.kv_source_layer_ids)
        ring = max(config.sliding_window, page_tokens) + rows_per_request
        return ring * (layers * cls.value_bytes(config, "window", dtype) + raw * config.head_dim * 4 + 4)

    @property
    def free_pages(self) -> int:
        """How many pages no request holds."""
        return self.pool.available

    @property
    def free_slots(self) -> int:
        """How many requests can still be taken in."""
        return len(self._free_slots)

    def acquire(self) -> int:
        """A free slot. Raises RuntimeError when every slot is taken."""
        if not self._free_slots:
            raise RuntimeError(f"all {len(self._pages)} slots are taken: release one before acquiring another")
        return self._free_slots.pop()

    def pages(self, slot: int) -> list[int]:
        """The pages of `slot`, in the order of the positions."""
        return list(self._pages[slot])

    def reserve(self, slot: int, length: int) -> None:
        """Give `slot` the pages for positions 0..length - 1. Raises `OutOfPages` and takes nothing if too few."""
        if length > self.max_model_len:
            raise ValueError(f"{length} tokens of context: the state was made for {self.max_model_len}")
        pages = self._pages[slot]
        missing = -(-length // self.page_tokens) - len(pages)
        if missing <= 0:
            return
        if missing > self.free_pages:
            raise OutOfPages(
                f"slot {slot} needs {missing} more pages of {self.page_tokens} tokens, {self.free_pages} are free"
            )
        self._add_pages(slot, self.pool.take(missing))

    def release(self, slot: int) -> None:
        """Take back the slot and its pages."""
        if slot in self._free_slots:
            raise ValueError(f"slot {slot} is not in use")
        self.pool.drop(self._pages[slot])
        self._pages[slot] = []
        self._ring_starts[slot] = 0
        self._free_slots.append(slot)

    def _add_pages(self, slot: int, pages: Sequence[int]) -> None:
        held = self._pages[slot]
        upload(pages, self.page_table[slot, len(held) : len(held) + len(pages)])
        held.extend(pages)

    # -- sharing prefixes -----------------------------------------------------------------------------------------

    def save_windows(self, slot: int, page_number: int) -> None:
        """Copy the window entries of one complete page of `slot` out of the rings, which will overwrite them.

        Where a long chunk has displaced them already, they were saved with it.
        """
        if page_number * self.page_tokens >= self._ring_starts[slot]:
            self._save(slot, page_number, self.page_tokens)

    def _save(self, slot: int, page_number: int, count: int) -> None:
        """Copy the window entries of the first `count` positions of a page out of the rings."""
        first = page_number * self.page_tokens
        places = torch.arange(first, first + count, device=self.device) % self.ring
        page, layers = self._pages[slot][page_number], self.config.num_hidden_layers
        self._copy(self.page_windows, np.s_[:layers, page, :count], self.window, np.s_[:, slot, places])
        self._copy(self.page_windows, np.s_[layers:, page, :count], self.draft_window, np.s_[:, slot, places])

    @staticmethod
    def _copy(to: Store, where: Any, values: Store, which: Any) -> None:
        """Copy `values[which]` to `to[where]`, which holds values of the same kind."""
        to[where] = values[which]

    def begin_chunk(self, rows: Rows) -> None:
        """To be called in front of a forward that writes no more than the ends of its rows to the rings."""
        for span in rows.spans:
            count = span.end - span.first
            if count > self.rows_per_request:
                number, kept = divmod(span.start, self.page_tokens)
                if kept and self.keeps_windows:  # these will not be in the rings when their page is complete
                    self._save(span.slot, number, kept)
                self._ring_starts[span.slot] = max(0, span.start + count - self.ring)
            else:
                self._ring_starts[span.slot] = min(self._ring_starts[span.slot], span.start)

    def attach(self, slot: int, pages: Sequence[int], history: Tensor) -> None:
        """Start `slot`, which holds nothing yet, behind complete `pages` that were published with their windows.

        `history` [tokens] int64 are the compressed ids of the tokens in front of the border (as many as the Engram
        looks back, fewer only at the start of the sequence).
        """
        assert not self._pages[slot], "only an empty slot can start behind shared pages"
        self.pool.share(pages)
        self._add_pages(slot, pages)
        border, layers = len(pages) * self.page_tokens, self.config.num_hidden_layers
        needed = -(-self.config.sliding_window // self.page_tokens)
        for number in range(max(0, len(pages) - needed), len(pages)):
            first = number * self.page_tokens
            places = torch.arange(first, first + self.page_tokens, device=self.device) % self.ring
            self._copy(self.window, np.s_[:, slot, places], self.page_windows, np.s_[:layers, pages[number]])
            self._copy(self.draft_window, np.s_[:, slot, places], self.page_windows, np.s_[layers:, pages[number]])
        positions = torch.arange(border - len(history), border, device=self.device)
        self.history[slot, positions % self.ring] = history.int()

    def check(self, rows: Rows) -> None:
        """Raise ValueError where `rows` cannot be run: too many rows of a request, or positions without a page."""
        for span in rows.spans:
            count = span.end - span.first
            if count > self.chunk_rows:
                raise ValueError(
                    f"{count} rows of slot {span.slot} in one forward: at most {self.chunk_rows} (rows_per_request, "
                    "chunk_rows); split the prompt into chunks"
                )
            covered = len(self._pages[span.slot]) * self.page_tokens
            if span.start + count > covered:
                raise ValueError(
                    f"slot {span.slot} holds pages for {covered} positions, a row stands at "
                    f"{span.start + count - 1}: reserve pages before the forward"
                )

    # -- rings ----------------------------------------------------------------------------------------------------

    def write_ring(self, ring: Store, rows: Rows, values: Tensor) -> None:
        """Store `values` [rows, ...] at the rows' positions of `ring` [slots, ring, ...]."""
        ring[rows.slots, rows.positions % self.ring] = values

    def read_ring(self, ring: Store, slots: Tensor, positions: Tensor) -> Tensor:
        """Entries [rows, n, ...] of `ring` [slots, ring, ...] at `positions` [rows, n]; any entry where negative."""
        return ring[slots.unsqueeze(-1), positions % self.ring]

    def window_positions(self, last: Tensor) -> Tensor:
        """The positions [rows, window] that end at `last` [rows]; negative where the sequence had not begun."""
        window = self.config.sliding_window
        return last.unsqueeze(-1) + torch.arange(1 - window, 1, device=self.device)

    # -- compressed entries ---------------------------------------------------------------------------------------

    def _place(self, source: int, slots: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Page and offset of entry numbers of one KV source."""
        per_page = self.page_tokens // self.config.compress_ratios[source]
        return self.page_table[slots, entries // per_page].long(), entries % per_page

    def write_entries(self, source: int, slots: Tensor, entries: Tensor, kv: Tensor, keys: Tensor) -> None:
        """Store KV [n, head_dim] and index keys [n, index_head_dim] as `entries` [n] of `slots` [n]."""
        place = self._place(source, slots, entries)
        self.kv[source][place] = kv
        self.index_keys[source][place] = keys

    def read_entries(self, source: int, slots: Tensor, entries: Tensor) -> Tensor:
        """KV [rows, n, head_dim] of `entries` [rows, n]; any entry where the number is negative."""
        return self.kv[source][self._place(source, slots.unsqueeze(-1), entries.clamp(min=0))]

    def read_index_keys(self, source: int, slot: int, count: int) -> Tensor:
        """Index keys [count, index_head_dim] of entries 0..count - 1 of one request."""
        per_page = self.page_tokens // self.config.compress_ratios[source]
        pages = self.page_table[slot, : -(-count // per_page)].long()
        return self.index_keys[source][pages].flatten(0, 1)[:count]
