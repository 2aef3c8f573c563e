"""Where a rank stands in its gang, and how it speaks to the others. Objects passed in, never ambient.

`Groups` is the whole of what layers and runner know of other ranks. Here is the rank that stands alone: every sum is
its own, and there is nobody to send to. distributed.py has the gang's. Knows no layers and no plans.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """A gang is ``pp`` stages of ``tp`` ranks, numbered stage by stage; this rank's place in it."""

    tp: int = 1
    pp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0

    @classmethod
    def of(cls, rank: int, tp: int, pp: int) -> "Place":
        return cls(tp, pp, rank % tp, rank // tp)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def samples(self) -> bool:
        """The first tensor rank of the last stage draws ids for the gang."""
        return self.is_last_stage and self.tp_rank == 0


class Groups:
    """A rank alone. Collectives are called by all ranks of a stage, in the same order, with equal shapes.

    ``num_on_host``: ranks of the gang on this rank's host, itself included; they share its memory.
    """

    def __init__(self, place: Place | None = None, num_on_host: int = 1):
        self.place = place or Place()
        self.num_on_host = num_on_host

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Over the tensor ranks of this stage, the same bits on each. May be done in place: ``x`` is given away."""
        return x

    def gather(self, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor | None:
        """Column shards [rows, sizes[tp_rank]] of a stage's tensor ranks as one [rows, sum(sizes)] on tensor rank 0;
        None on the others."""
        return x

    def share(self, x: torch.Tensor | None, num: int) -> torch.Tensor:
        """[num] int64 of tensor rank 0, who alone has ``x``, on every tensor rank of the stage."""
        assert x is not None
        return x

    def send(self, x: torch.Tensor) -> None:
        """To the same tensor rank of the next stage. Does not wait for it."""
        raise AssertionError("there is no next stage")

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What the stage before sent, in its order."""
        raise AssertionError("there is no stage before")

    def smallest(self, value: int) -> int:
        """Of all ranks of the gang, who all come here before any goes on."""
        return value

    def barrier(self) -> None:
        """Returns once all ranks of the gang are here."""
        self.smallest(0)

    def close(self) -> None:
        """Lets go of sockets and shared memory."""
