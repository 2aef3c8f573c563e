"""What the rest of the house may know of a model: the card. Weights and layers stay in the worker."""

import msgspec


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table. All groups take their blocks from one pool, and ids mean the same on every
    rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per block
    dtype: str  # of the cached keys and values
    window: int = 0  # tokens that a query sees, itself included; 0: all

    @property
    def bytes_per_token(self) -> int:
        size = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * size


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Made once by the worker's loader, whatever the weights came from; served by ``ReplicaService.GetModel``.

    ``fingerprint`` names weights, tokenizer and KV layout: two replicas with the same one give the same answers and
    may share prefix hashes. ``vocab_size`` is the count of ids that the model can emit.
    """

    name: str
    architecture: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    kv_groups: tuple[KVGroup, ...]
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    add_bos: bool = False  # the tokenizer puts BOS before plain text
    generation_defaults: dict[str, float | int] = {}
    chat_template: str | None = None
    template_tokens: dict[str, str] = {}  # bos_token, eos_token, ... as the chat template names them
    tokenizer_json: str = ""
    capabilities: tuple[str, ...] = ("generate",)

    @property
    def block_size(self) -> int:
        return self.kv_groups[0].block_size

    @property
    def windows(self) -> tuple[int, ...]:
        """By group."""
        return tuple(group.window for group in self.kv_groups)

    @property
    def kv_bytes_per_token(self) -> int:
        """That a token takes while every layer sees it, over all ranks. Blocks are as large as the largest group needs,
        so that a group of fewer layers takes no less. Beyond its window a group gives its part back."""
        return len(self.kv_groups) * max(group.bytes_per_token for group in self.kv_groups)
