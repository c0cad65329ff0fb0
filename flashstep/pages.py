"""Who holds which page, and which pages can be found again by their content: the prefix cache.

A page that is complete can be published under a key that stands for its tokens and all tokens before them. It stays
findable after its last holder has gone, until its place is needed: then the page that was let go longest ago is taken
first. Knows nothing of what a page contains.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


class OutOfPages(RuntimeError):  # noqa: N818 - the condition is expected and handled, not a fault
    """Fewer pages can be had than a request needs."""


def page_keys(tokens: Sequence[int], page_tokens: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Keys of the complete pages of `tokens`, each over everything from the start; `known` are those of the first."""
    keys = list(known)
    for start in range(len(keys) * page_tokens, len(tokens) - page_tokens + 1, page_tokens):
        content = np.asarray(tokens[start : start + page_tokens], dtype=np.int64).tobytes()
        keys.append(hashlib.blake2b(content, digest_size=16, key=keys[-1] if keys else b"").digest())
    return keys


class PagePool:
    """`num_pages` pages, each held by any number of requests; free ones may still be findable."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, held by nobody; longest idle first

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages that can be found by their content, held or idle."""
        return len(self._page_of)

    def take(self, count: int) -> list[int]:
        """`count` pages for one holder; idle ones lose their content. Raises `OutOfPages` and takes none if too few."""
        if count > self.available:
            raise OutOfPages(f"{count} more pages are needed, {self.available} of {self.num_pages} are free")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of `keys`, from the first, that can be found."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def share(self, pages: Iterable[int]) -> None:
        """One more holder of each of `pages`, which are held or idle."""
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)

    def drop(self, pages: Sequence[int]) -> None:
        """One holder less. Of a sequence's idle pages the last is taken first: without it the others still serve."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, key: bytes) -> bool:
        """Make a held, complete page findable; False where another page already stands for that content."""
        if key in self._page_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def withdraw(self, pages: Iterable[int]) -> None:
        """Make `pages` unfindable: their content is not to be trusted."""
        for page in pages:
            if page in self._key_of:
                self._forget(page)
                if page in self._idle:
                    del self._idle[page]
                    self._free.append(page)

    def check(self) -> None:
        """Raise AssertionError where the records contradict each other; for tests."""
        held = {page for page, holders in enumerate(self._holders) if holders}
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert held | free | idle == set(range(self.num_pages)), "a page is lost"
        assert not held & free, "a page is held and free"
        assert not held & idle, "a page is held and idle"
        assert not free & idle, "a page is free and idle"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages disagree"
        assert idle <= set(self._key_of), "an idle page cannot be found"
        assert not free & set(self._key_of), "a free page can be found"

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
