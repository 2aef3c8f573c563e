"""What a router is told at start. Frozen; read from flags and environment by the command line only."""

import msgspec


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas come from a controller, which streams the set, from a fixed list, from a name in DNS, or from any of
    them together; there may be none yet. Times are seconds.

    ``max_stop`` is OpenAI's limit of four raised to what agents send; ``max_stop_len`` bounds the work per token.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one; the real one is told to `ready`
    grpc_port: int | None = None  # None: no gRPC; 0: any free one, which the log names
    grpc_reflection: bool = False
    grpc_max_message_bytes: int = 64 * 1024 * 1024  # both ways
    ssl_certfile: str | None = None  # PEM files, for HTTP and gRPC alike; the certificate's file may hold its chain
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None  # clients must show a certificate that one of these signed
    api_key_file: str | None = None  # who may ask; None: everybody
    open_routes: tuple[str, ...] = ()  # need no key, as liveness never does
    controller: str | None = None  # HOST:PORT of ClusterService
    replicas: tuple[str, ...] = ()  # HOST:PORT of ReplicaService
    replicas_dns: str | None = None  # NAME:PORT: a ReplicaService at every address of the name
    cluster_token: str | None = None  # shown to replicas and controller
    routing_policy: str = "least_loaded"
    queue_timeout: float | None = None  # until the first step; a header may ask for less than these three, not for more
    first_token_timeout: float | None = None
    request_timeout: float | None = 1800.0
    drain_seconds: float = 30.0  # for what runs when the router is asked to stop
    slow_reader_seconds: float = 30.0  # for a client that reads nothing while its stream has more than
    max_unread_tokens: int = 1024  # so many tokens,
    max_unread_bytes: int = 256 * 1024  # or bytes, that it has not taken
    strict: bool = False  # fields that nothing reads are refused instead of ignored
    ping_seconds: float = 10.0  # between comments in a stream that has no token yet; 0: none
    max_body_bytes: int = 16 * 1024 * 1024
    max_body_values: int = 1_000_000  # ids, members and so on of one body
    max_n: int = 128  # choices per prompt
    max_prompts: int = 2048  # prompts per request
    max_choices: int = 4096  # prompts times n
    max_stop: int = 16  # stop strings per request
    max_stop_len: int = 1024  # characters of one stop string
    max_stop_ids: int = 128
    max_logit_bias: int = 1024  # entries
    max_salt_len: int = 1024  # characters
    max_logprobs: int = 20
    chat_template: str | None = None  # text of a template that replaces the model's own
