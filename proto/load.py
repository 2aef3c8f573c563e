"""How busy a replica is: what policies, the autoscaler and metrics read. Made by the engine as it goes."""

import msgspec


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of a replica holds, in bytes; fixed once it has started."""

    rank: int
    weight_bytes: int
    kv_bytes: int  # of the whole pool
    kv_bytes_per_token: int


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are of sequences (an n = 4 request counts four). ``*_total`` never fall while the replica lives."""

    step_id: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0  # tokens that waiting and prefilling sequences still need computed
    tokens_per_second: float = 0.0  # generated, over the last seconds
    blocks_used: int = 0  # referenced only: 0 at idle with a warm cache
    blocks_total: int = 0
    prompt_tokens_total: int = 0
    cached_prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    computed_tokens_total: int = 0
    recomputed_tokens_total: int = 0  # computed again after a preemption
    discarded_tokens_total: int = 0  # computed past an end that was not known yet (depth 2)
    preemptions_total: int = 0
    block_copies_total: int = 0
    finished_total: dict[str, int] = {}
