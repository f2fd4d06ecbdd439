"""From whom each generator fetches a file: a tree, so that nobody's link carries it to all.

    trainer -> a, b        a -> c, d        b -> e, f

Whoever asks becomes the child of the shallowest source that has fewer than MAX_CHILDREN fetching
from it: the trainer, then generators in the order in which they asked. A generator that is itself
still fetching is a source as well, of what it has by then: so the whole tree is filled in about the
time of one fetch. Who has the file counts no more as a child.

`WeightTree` only knows names; `Sources` has a tree for each file, and the generators' addresses.
"""

import urllib.parse
from collections.abc import Collection
from dataclasses import dataclass

MAX_CHILDREN = 2
"""That fetch from one source at a time."""

ROOT = ""
"""The trainer."""


@dataclass
class _Place:
    parent: str
    fetching: bool = True


class WeightTree:
    """Who fetches one file from whom."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def source_of(self, name: str, *, able: Collection[str], failed: Collection[str] = ()) -> str:
        """The source of a generator, which asks (again): ROOT or another generator. `able` are
        those that can send; none of `failed` is chosen, and nobody who waits for the one that
        asks."""
        self._places.pop(name, None)
        sources = [ROOT, *(source for source in self._places if source in able)]
        free = [
            source
            for source in sources
            if source not in failed
            and self._num_children(source) < MAX_CHILDREN
            and not self._waits_for(source, name)
        ]
        chosen = min(free, key=self._depth, default=ROOT)  # of equals the first
        self._places[name] = _Place(chosen)
        return chosen

    def has_it(self, name: str) -> None:
        """A generator has the file whole."""
        self._places.setdefault(name, _Place(ROOT)).fetching = False

    def left(self, name: str) -> None:
        """A generator is gone, or has deleted the file."""
        self._places.pop(name, None)

    def _num_children(self, source: str) -> int:
        return sum(place.fetching and place.parent == source for place in self._places.values())

    def _depth(self, source: str) -> int:
        """Senders between the trainer's copy and what this source sends; 0 where it has all."""
        depth = 0
        while (place := self._places.get(source)) is not None and place.fetching:
            depth, source = depth + 1, place.parent
        return depth

    def _waits_for(self, source: str, name: str) -> bool:
        while source != name:
            place = self._places.get(source)
            if place is None or not place.fetching:
                return False
            source = place.parent
        return True


class Sources:
    """Where each generator is to fetch each file from."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}
        self._trees: dict[str, WeightTree] = {}

    def joined(self, name: str, *, address: str) -> None:
        """A generator is here, new or again; without an address it sends nothing to others."""
        self.left(name)
        if address:
            self._addresses[name] = address

    def left(self, name: str) -> None:
        """A generator is gone."""
        self._addresses.pop(name, None)
        for tree in self._trees.values():
            tree.left(name)

    def find(self, name: str, *, sha256: str, failed: Collection[str]) -> str:
        """host:port for `name` to fetch a file from; ROOT for the trainer. `failed` are
        addresses."""
        addresses = self._addresses
        source = self._trees.setdefault(sha256, WeightTree()).source_of(
            name,
            able=addresses.keys() - {name},
            failed={other for other, address in addresses.items() if address in failed},
        )
        return addresses.get(source, ROOT)

    def serves(self, name: str, files: Collection[str]) -> None:
        """A generator has files of these digests whole, and no others."""
        for sha256, tree in self._trees.items():
            if sha256 in files:
                tree.has_it(name)
            else:
                tree.left(name)

    def keep_only(self, files: Collection[str]) -> None:
        """Forget who fetches other files than these."""
        self._trees = {sha256: tree for sha256, tree in self._trees.items() if sha256 in files}


def address_of(peer: str, port: int) -> str:
    """Where a caller of this peer name listens; ROOT where nobody else could call it.

    Example: "ipv4:10.0.0.7:41234" with port 50051 is "10.0.0.7:50051", "ipv6:%5B::1%5D:41234" is
    "[::1]:50051"; port 0 or a socket file is no address.
    """
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    host = rest.rpartition(":")[0]
    return f"{host}:{port}" if port and kind in ("ipv4", "ipv6") else ROOT
