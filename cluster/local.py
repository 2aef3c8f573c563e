"""A replica of one rank: the executor is the rank itself, in the engine's thread. The only door from here to torch.

Import this file in the process and, better, on the thread that will run the steps: it brings torch in.
"""

from collections import deque
from collections.abc import Callable

from paceline.cluster.engine.executor import Loaded
from paceline.proto.step import StepPlan, StepResult
from paceline.worker.config import RankConfig
from paceline.worker.rank import PendingStep, Rank


class LocalExecutor:
    """Steps run when they are submitted: on a CPU to the end, on a GPU up to the launch, so that collect() waits."""

    def __init__(self, rank: Rank):
        self._rank = rank
        self._outstanding: deque[PendingStep] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._outstanding.append(self._rank.execute(plan))

    def collect(self) -> StepResult:
        return self._outstanding.popleft().result()

    def check(self) -> None:
        """The rank is this thread's own."""

    def close(self) -> None:
        self._outstanding.clear()

    def kill(self) -> None:
        """The rank ends with the process."""


def load_local(config: RankConfig, on_phase: Callable[[str, float], None]) -> Loaded:
    """Loads the model on this thread. Raises StartupError."""
    rank = Rank(config, on_phase=on_phase)
    depth = 1 if rank.device.type == "cpu" else 2  # on a CPU nothing would run beside this thread
    return Loaded(LocalExecutor(rank), rank.card, rank.num_kv_blocks, rank.describe(), depth, (rank.held,))
