"""Turns, barriers and memory of a program on a Hopper GPU, for ``gluon_stand_in``."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Columns of the pieces that a tile of the widest swizzle consists of in shared memory.
SLAB = 64
# A partition, which yields what it waits for.
Partition = Iterator[Callable[[], bool]]


class Deadlock(Exception):
    """Every partition waits for another one."""


class Machine:
    """Who goes on next: one of the partitions that may, or something asynchronous.

    Attributes:
        me: the partition that goes on.
        copies: those under way, which end in any order.
        products: of each partition, in its order.
        written: what each partition wrote to shared memory and has not fenced.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.me = 0
        self.copies: list[Callable[[], None]] = []
        self.products: list[deque[Callable[[], None]]] = []
        self.written: list[list[Shared]] = [[]]

    def run(self, partitions: list[Partition]) -> None:
        """Run the partitions to their ends.

        Raises:
            Deadlock: none of them may go on, and nothing asynchronous is left.
        """
        self.products = [deque() for _ in partitions]
        self.written = [[] for _ in partitions]
        waiting: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(partitions)), lambda: True)
        while waiting:
            choices: list[Any] = [number for number, ready in waiting.items() if ready()]
            choices += [queue for queue in [self.copies, *self.products] if queue]
            if not choices:
                raise Deadlock(f"partitions {sorted(waiting)} wait")
            chosen = self.random.choice(choices)
            if chosen is self.copies:
                self.copies.pop(self.random.randrange(len(self.copies)))()
            elif isinstance(chosen, deque):
                chosen.popleft()()
            else:
                self.me = chosen
                ready = next(partitions[chosen], None)
                waiting |= {} if ready is None else {chosen: ready}
                if ready is None:
                    del waiting[chosen]


@dataclass
class Barrier:
    """An mbarrier: of how many arrivals, the arrivals and bytes that are missing, and its phase."""

    count: int = 0
    missing: int = 0
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        """After something arrived."""
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


class Barriers:
    """Shared memory that holds mbarriers."""

    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, number: Any) -> Barrier:
        """One of them."""
        assert int(number) >= 0
        return self.all[int(number)]


class Shared:
    """Shared memory twice: as ordinary loads and stores see it, and as what is asynchronous does."""

    def __init__(self, views: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, ...], machine: Machine) -> None:
        self.views, self.shape, self.machine = views, shape, machine
        self.dtype = views[0].dtype

    @staticmethod
    def unwritten(dtype: torch.dtype, shape: tuple[int, ...], machine: Machine) -> Shared:
        """NaN, as far as anybody knows."""
        size = torch.Size(shape).numel()
        return Shared(
            (torch.full((size,), torch.nan, dtype=dtype), torch.full((size,), torch.nan).to(dtype)), shape, machine
        )

    def index(self, number: Any) -> Shared:
        """A part by its first dimension."""
        number, size = int(number), self.views[0].numel() // self.shape[0]
        assert 0 <= number < self.shape[0]
        ordinary, asynchronous = (view[number * size :][:size] for view in self.views)
        return Shared((ordinary, asynchronous), self.shape[1:], self.machine)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        assert dtype == self.dtype and torch.Size(shape).numel() == self.views[0].numel()
        return Shared(self.views, tuple(shape), self.machine)

    def permute(self, order: tuple[int, int]) -> Transposed:
        """With the two dimensions exchanged."""
        assert order == (1, 0)
        return Transposed(self)

    def _in_order(self, view: torch.Tensor) -> torch.Tensor:
        """What lies in slabs of columns with the dimensions of the tile."""
        if len(self.shape) == 1:
            return view.view(self.shape)
        rows, columns = self.shape
        return view.view(columns // SLAB, rows, SLAB).permute(1, 0, 2)

    def write(self, value: torch.Tensor, view: int) -> None:
        """Into the first view or the second."""
        target = self._in_order(self.views[view])
        target.copy_(value.reshape(target.shape))

    def read(self, view: int) -> torch.Tensor:
        """From the first view or the second."""
        return self._in_order(self.views[view]).reshape(self.shape).clone()

    def load(self, layout: Any) -> torch.Tensor:
        """As threads do."""
        return self.read(0)

    def store(self, value: torch.Tensor) -> None:
        """As threads do: nothing asynchronous sees it before `fence`."""
        assert tuple(value.shape) == tuple(self.shape)
        self.write(value, 0)
        self.machine.written[self.machine.me].append(self)

    def fence(self) -> None:
        """Show it to what is asynchronous."""
        self.views[1].copy_(self.views[0])


@dataclass
class Transposed:
    """A view with its dimensions exchanged, which products read."""

    shared: Shared

    def read(self, view: int) -> torch.Tensor:
        """As `Shared.read`."""
        return self.shared.read(view).T


@dataclass
class Pointer:
    """An address in a tensor of one dimension, or many of them."""

    base: torch.Tensor
    offset: Any = 0

    @property
    def dtype(self) -> types.SimpleNamespace:
        """What it points to."""
        return types.SimpleNamespace(element_ty=self.base.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.base, self.offset + offset)


def load(address: Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
    """Integers are wide, whatever they are in memory."""
    offset = torch.as_tensor(address.offset)
    mask = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask.broadcast_to(offset.shape)
    found = address.base[torch.where(mask, offset, 0)]
    found = torch.where(mask, found, torch.tensor(other, dtype=found.dtype))
    return found if found.is_floating_point() else found.long()


def store(address: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    """Where the mask says so."""
    mask = mask.broadcast_to(address.offset.shape)
    address.base[address.offset[mask]] = value.broadcast_to(mask.shape)[mask]


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Of numbers or of two pointers."""
    if isinstance(yes, Pointer):
        return yes if condition else no
    return torch.where(torch.as_tensor(condition), torch.as_tensor(yes), torch.as_tensor(no))
