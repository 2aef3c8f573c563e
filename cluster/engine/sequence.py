"""One choice of one request while the engine works on it: the only mutable noun. Only the scheduler writes it.

Three cursors say where it stands; there are no phases. With L = len(token_ids):

    0 ........ num_computed ........ num_planned ........ L + num_pending
      KV committed        in flight              still to be planned

``num_planned`` moves in schedule, ``num_computed`` in commit, ``num_pending`` counts ids that planned steps will draw
and nobody knows yet. Preempt, abort and finish reset the cursors and raise ``epoch``: results of an older epoch are
dropped when they arrive.
"""

from paceline.proto.request import Request

NO_SLOT = -1
NEVER = 1 << 62


class Sequence:
    """See the module. ``key`` orders sequences totally: (priority, arrival, choice)."""

    __slots__ = (
        "block_ids",  # its blocks, by KV group and index, NULL_BLOCK where one has left the group's window
        "cacheable",  # takes part in the prefix cache
        "capacity",  # positions that block_ids reach to, in every group
        "choice",
        "compute_len",  # positions that it may compute: the whole prompt, and of what it emits all but the last id
        "epoch",
        "finish_reason",
        "hashes",  # names of its full blocks, as far as known
        "key",
        "max_len",  # prompt and all ids it may emit
        "next_name_at",  # num_computed at which the next block can be named
        "num_bypassed",  # smaller ones that passed it while it lacked blocks
        "num_cached",  # prompt tokens found in the prefix cache at first admission
        "num_computed",
        "num_held",  # positions below it are in the cache through a fork: never written
        "num_lost",  # positions planned before the last preemption
        "num_named",  # leading blocks that are in the prefix map
        "num_pending",
        "num_planned",
        "num_prompt",
        "num_to_fork",  # choices still to be made out of this one
        "planned_in",  # id of the last step that holds it
        "request",
        "request_id",
        "shared_end",  # below this position its last blocks may be shared with forks
        "slot",
        "started",  # was admitted once
        "stop_ids",
        "token_ids",  # prompt, then emitted ids
        "untold",  # first prompt position whose logprobs are still to be told; NEVER where there is none
    )

    def __init__(self, request: Request, choice: int, arrival: int, max_len: int, stop_ids: frozenset[int]):
        self.request = request
        self.request_id = request.request_id
        self.choice = choice
        self.key = (request.priority, arrival, choice)
        self.token_ids = list(request.prompt_ids)
        if request.resume:
            self.token_ids += request.resume[choice]
        self.num_prompt = len(request.prompt_ids)
        self.max_len = max_len
        self.compute_len = max(self.num_prompt, max_len - 1)
        self.stop_ids = stop_ids
        self.num_to_fork = 0
        asked = request.params.prompt_logprobs is not None and choice == 0 and self.num_prompt > 1
        # Whoever resumes with ids has been told of the whole prompt.
        self.untold = 1 if asked and not any(request.resume) else NEVER
        self.epoch = 0
        self.slot = NO_SLOT
        self.num_planned = self.num_computed = self.num_pending = 0
        self.block_ids: list[list[int]] = []  # no groups at all while it holds nothing
        self.capacity = 0
        self.shared_end = 0
        self.cacheable = False
        self.hashes: list[bytes] = []
        self.num_named = 0
        self.next_name_at = NEVER
        self.num_cached = 0
        self.num_held = 0
        self.num_lost = 0
        self.num_bypassed = 0
        self.planned_in = -1
        self.started = False
        self.finish_reason: str | None = None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_todo(self) -> int:
        """Tokens that no plan holds yet."""
        return len(self.token_ids) + self.num_pending - self.num_planned

    def __repr__(self) -> str:
        return (
            f"<{self.request_id}/{self.choice} key={self.key} len={len(self.token_ids)} "
            f"planned={self.num_planned} computed={self.num_computed} slot={self.slot} epoch={self.epoch}>"
        )
