"""Where a rank stands in its gang. An object passed in, never ambient; today every rank stands alone."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Groups:
    """Sizes of the tensor- and pipeline-parallel groups, and this rank's place in each."""

    tp: int = 1
    pp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0

    @property
    def samples(self) -> bool:
        """The first tensor rank of the last stage draws ids for the gang."""
        return self.pp_rank == self.pp - 1 and self.tp_rank == 0
