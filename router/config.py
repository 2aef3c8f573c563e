"""What a router is told at start. Frozen; read from flags and environment by the command line only."""

import msgspec


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas come from a controller, which streams the set, or from a fixed list of ``HOST:PORT``; never from both.

    ``max_stop`` is OpenAI's limit of four raised to what agents send; ``max_stop_len`` bounds the work per token.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one; the real one is told to `ready`
    controller: str | None = None  # HOST:PORT of ClusterService
    replicas: tuple[str, ...] = ()  # HOST:PORT of ReplicaService
    max_body_bytes: int = 16 * 1024 * 1024
    max_n: int = 128  # choices per prompt
    max_prompts: int = 2048  # prompts per request
    max_choices: int = 4096  # prompts times n
    max_stop: int = 16  # stop strings per request
    max_stop_len: int = 1024  # characters of one stop string
    max_stop_ids: int = 128
    max_logprobs: int = 20
    chat_template: str | None = None  # text of a template that replaces the model's own
