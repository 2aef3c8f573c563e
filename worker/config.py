"""What one rank is told at start. Frozen; the command line and the replica make it, nobody reads the environment."""

import msgspec


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``model`` is a local path (a Hugging Face folder or a GGUF file): names are resolved before, by sources.py.

    ``max_model_len`` None: the model's own, lowered to what the KV pool can hold. ``num_kv_blocks`` None: sized from
    ``kv_memory_share`` of the memory that is free once the weights are loaded.
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
    num_threads: int | None = None
    dump_dir: str | None = None  # where the last plans go when a step fails
