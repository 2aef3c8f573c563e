"""What an engine asks of whatever runs its plans. It never sees a worker, only this."""

from typing import NamedTuple, Protocol

from paceline.proto.load import RankMemory
from paceline.proto.model import ModelCard
from paceline.proto.step import StepPlan, StepResult

IDLE_CHECK = 1.0  # seconds between looks at what is idle


class Executor(Protocol):
    """Plans run in the order of submit, whole, and each gives one result. Called from the engine's thread only, but
    for ``kill``."""

    def submit(self, plan: StepPlan) -> None:
        """Hands a plan over; up to the engine's depth are outstanding."""

    def collect(self) -> StepResult:
        """The result of the oldest outstanding plan, waiting for it. Raises what ended the gang."""

    def check(self) -> None:
        """Called each IDLE_CHECK while nothing is outstanding; must not wait. Raises what ended the gang."""

    def close(self) -> None:
        """Ends the ranks."""

    def kill(self) -> None:
        """Ends ranks that have processes of their own, at once, whatever they do. From any thread, at any time."""


class Loaded(NamedTuple):
    """What a replica needs to start its engine, whatever executes the plans. ``depth``: plans in flight that pay."""

    executor: Executor
    card: ModelCard
    num_blocks: int
    description: str
    depth: int = 1
    ranks: tuple[RankMemory, ...] = ()
