"""What one rank is told at start. Frozen; the command line and the replica make it, nobody reads the environment."""

import msgspec

from paceline.proto.paging import plan_budget


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``model`` is a local path (a Hugging Face folder or a GGUF file): names are resolved before, by sources.py.

    ``max_model_len`` None: the model's own, lowered to what the KV pool can hold. ``num_kv_blocks`` None: sized from
    ``kv_memory_share`` of the memory that is free once the weights are loaded. ``rank_memory``: GiB that one rank may
    take for weights and KV; None: what its device has. The gang has ``tensor_parallel_size`` times
    ``pipeline_parallel_size`` ranks.
    """

    model: str
    served_model_name: str
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_memory_share: float | None = None
    attention_backend: str = "auto"
    quantization: str | None = None  # a name of quant/formats.py; None: weights stay in dtype
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank_memory: float | None = None
    dump_dir: str | None = None  # where the last plans go when a step fails

    @property
    def plan_budget(self) -> int:
        """Tokens of one plan."""
        return plan_budget(self.max_num_batched_tokens, self.pipeline_parallel_size)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size
