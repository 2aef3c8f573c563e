"""The numbers a scheduler decides with. Frozen; made by the replica once the rank has said what its pool holds."""

import msgspec

from paceline.proto.errors import StartupError
from paceline.proto.paging import Paging, plan_budget


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts unless said otherwise.

    ``long_prefill_tokens``: a prompt with more left to compute than this is long: while others want to prefill too it
    takes at most as many of a step, or half of what pace.py leaves of it, and at most ``max_partial_prefills`` long
    ones are in prefill at once.
    ``max_bypasses``: how often smaller requests may pass a waiting head that lacks blocks.
    ``max_waiting_requests`` counts choices, ``max_waiting_tokens`` what they still need computed: what comes beyond is
    refused as overload; 0 is no limit.
    ``target_itl``: seconds between two tokens of a stream that prompts beside it are cut to keep; 0 cuts nothing.
    ``depth``: plans that may be in flight. ``num_stages``: of the pipeline that runs them.
    ``windows``: by KV group, tokens that a query sees, itself included; 0 sees all (paging.py).
    ``scheduling_policy``: "priority" or "fcfs" (a priority other than 0 is then refused).
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    windows: tuple[int, ...] = (0,)
    eos_ids: tuple[int, ...] = ()
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    long_prefill_tokens: int | None = None  # None: half of the budget
    max_partial_prefills: int = 2
    max_bypasses: int = 16
    target_itl: float = 0.1
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 0
    enable_prefix_caching: bool = True
    scheduling_policy: str = "priority"
    depth: int = 1
    num_stages: int = 1
    check: bool = False  # verify every invariant after each step, not only at idle

    def __post_init__(self):
        for field in (
            "num_blocks",
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "depth",
            "num_stages",
        ):
            if getattr(self, field) < 1:
                raise StartupError(f"{field} is {getattr(self, field)}: it must be at least 1")
        for field in ("max_waiting_requests", "max_waiting_tokens", "target_itl"):
            if getattr(self, field) < 0:
                raise StartupError(f"{field} is {getattr(self, field)}: 0 is no limit, less than that is nothing")
        if not self.windows or min(self.windows) < 0:
            raise StartupError(f"windows are {self.windows}: one for each KV group is needed, 0 sees all")
        if self.scheduling_policy not in ("priority", "fcfs"):
            raise StartupError(f"scheduling policy {self.scheduling_policy!r} is unknown: use priority or fcfs")

    @property
    def plan_budget(self) -> int:
        """Tokens of one plan."""
        return plan_budget(self.max_num_batched_tokens, self.num_stages)

    @property
    def target_step_seconds(self) -> float:
        """A stream's token goes through all stages before its next one is planned."""
        return self.target_itl / self.num_stages

    @property
    def paging(self) -> Paging:
        return Paging(self.block_size, self.windows, self.plan_budget)

    @property
    def long_prefill_threshold(self) -> int:
        return self.long_prefill_tokens or max(1, self.plan_budget // 2)
