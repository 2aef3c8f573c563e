"""Every setting of paceline, once: flags, PACELINE_<NAME> variables and the config file's keys come from this table.

A row says where its value goes (`router.port` is the field ``port`` of RouterConfig); type and default are that field's
own. What a command is given is looked up in this order: flag, environment, file, the field's default. Pure: nobody here
reads the environment or parses a command line (`cli.py`, `flags.py`).
"""

import difflib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from paceline.cluster.config import ClusterConfig, ReplicaConfig
from paceline.proto import logs
from paceline.proto.errors import StartupError
from paceline.router.auth import OPENABLE
from paceline.router.bench.config import BenchConfig
from paceline.router.bench.workloads import WORKLOADS
from paceline.router.config import RouterConfig
from paceline.worker.config import RankConfig

CONFIGS: dict[str, type[msgspec.Struct]] = {
    "router": RouterConfig,
    "cluster": ClusterConfig,
    "replica": ReplicaConfig,
    "rank": RankConfig,
    "bench": BenchConfig,
}
# Who needs a config needs its settings.
COMMANDS = {
    "router": ("serve", "router"),
    "cluster": ("serve", "controller"),
    "replica": ("serve", "controller", "replica", "bench"),
    "rank": ("serve", "controller", "replica", "bench"),
    "bench": ("bench",),
}
SERVING = ("serve", "router", "controller", "replica")
HOLDS_REPLICAS = ("serve", "controller", "replica")
LOADS_A_MODEL = COMMANDS["rank"]

MODEL, SERVER, LIMITS = "Model", "Server", "Limits"
ENGINE, MEMORY, CLUSTER, LOGS, LOAD = "Engine", "Memory and device", "Cluster", "Logs", "Load"
# The config file may group its keys under these.
SECTIONS = {panel.split()[0].lower() for panel in (MODEL, SERVER, LIMITS, ENGINE, MEMORY, CLUSTER, LOGS, LOAD)}


@dataclass(frozen=True)
class Setting:
    """``into`` names config fields, all of one type. Without any, a command reads the value itself: ``type`` and
    ``default`` are then the row's own. ``shown`` tells a default that is worked out later; ``also`` are other flags of
    the same meaning."""

    name: str
    panel: str
    help: str
    into: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    type: Any = str
    default: Any = None
    choices: tuple[str, ...] = ()
    shown: str | None = None
    also: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PACELINE_" + self.name.upper()

    def parse(self, value: Any, where: str) -> Any:
        """From text, or from what YAML made of it. Raises StartupError that says where the value stood."""
        if self.type == tuple[str, ...] and isinstance(value, (str, list)):
            texts = [value] if isinstance(value, str) else value
            value = [part.strip() for text in texts for part in str(text).split(",") if part.strip()]
        if self.choices and value not in self.choices:
            raise StartupError(f"{where}: {value!r} is none of {', '.join(self.choices)}")
        try:
            return msgspec.convert(value, self.type, strict=False)
        except msgspec.ValidationError as error:
            text = str(error).replace("`", "")
            raise StartupError(f"{where}: {text[0].lower()}{text[1:]}, not {value!r}") from None


def _row(
    panel: str,
    name: str,
    help: str,
    *into: str,
    least: Any = None,
    most: Any = None,
    above: Any = None,
    **more: Any,
) -> Setting:
    """A Setting whose type, default and commands are those of its first field, unless they are given. What is as much
    as ``above`` is too little."""
    if into:
        room, field = into[0].split(".")
        hint = _without_none(typing.get_type_hints(CONFIGS[room])[field])
        default = next(f.default for f in msgspec.structs.fields(CONFIGS[room]) if f.name == field)
        of_rooms = {command: None for path in into for command in COMMANDS[path.split(".")[0]]}
        more = {"type": hint, "default": default, "commands": tuple(of_rooms)} | more
    bounds: dict[str, Any] = {"ge": least, "le": most, "gt": above}
    if bounds := {kind: value for kind, value in bounds.items() if value is not None}:
        more["type"] = typing.Annotated[more["type"], msgspec.Meta(**bounds)]
    return Setting(name, panel, help, into, **more)


def _without_none(hint: Any) -> Any:
    """A setting that is not given keeps its default: nobody can give None."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return kinds[0] if type(None) in typing.get_args(hint) else hint


SETTINGS: tuple[Setting, ...] = (
    _row(LOAD, "url", "Server to measure: any that speaks OpenAI's completions.", "bench.url"),
    _row(LOAD, "engine", "Measure an engine in this process, without HTTP, instead of a server.", "bench.engine"),
    _row(LOAD, "workload", "What is asked; random ids, so that servers do equal work.", "bench.workload",
         choices=tuple(WORKLOADS)),
    _row(LOAD, "num_requests", "Requests of a run.", "bench.num_requests", least=1),
    _row(LOAD, "num_warmups", "Requests before the first run that do not count.", "bench.num_warmups", least=0),
    _row(LOAD, "concurrency", "Requests that are always open, in a closed loop.", "bench.concurrency", least=1),
    _row(LOAD, "rate", "Requests a second at random times (Poisson), in an open loop.", "bench.rate", above=0,
         shown="a closed loop"),
    _row(LOAD, "slo", "Limits of p99, such as ttft=1s,itl=100ms (also e2e): searches for the most load within them.",
         "bench.slo"),
    _row(LOAD, "seed", "Decides all prompts and arrivals.", "bench.seed"),
    _row(LOAD, "vocab_size", "Ids to draw prompts from.", "bench.vocab_size", least=2,
         shown="the engine's; of a server 32000"),
    _row(LOAD, "price_per_hour", "Of the machine: tells what a million tokens cost.", "bench.price_per_hour", above=0),
    _row(LOAD, "json", "File for all figures.", "bench.json"),
    _row(LOAD, "plot", "PNG for a plot; needs the extra `bench`.", "bench.plot"),
    _row(LOAD, "key_file", "File with the API key and nothing else; without it PACELINE_API_KEY is read.",
         commands=("bench",)),

    _row(MODEL, "model", "Folder, .gguf file, Hub id (org/name), or the built-in name smollm2.", commands=LOADS_A_MODEL,
         default="smollm2", also=("-m",)),
    _row(MODEL, "served_model_name", "Name that clients use.", commands=LOADS_A_MODEL,
         shown="the last part of --model"),
    _row(MODEL, "dtype", "Type that the model computes in.", "rank.dtype",
         choices=("auto", "float32", "bfloat16", "float16")),
    _row(MODEL, "max_model_len", "Longest prompt plus answer, in tokens.", "rank.max_model_len", least=1,
         shown="the model's own"),
    _row(MODEL, "chat_template", "File with a Jinja template that replaces the model's.",
         commands=COMMANDS["router"]),

    _row(SERVER, "host", "Address to listen on.", "router.host"),
    _row(SERVER, "port", "Port of the HTTP API; 0 takes a free one.", "router.port", least=0, most=65535),
    _row(SERVER, "grpc_port", "Port of the gRPC API; 0 takes a free one.", "router.grpc_port", least=0, most=65535,
         shown="no gRPC"),
    _row(SERVER, "grpc_reflection", "Tell gRPC clients what services there are.", "router.grpc_reflection"),
    _row(SERVER, "grpc_max_message_bytes", "Largest gRPC message.", "router.grpc_max_message_bytes", least=1),
    _row(SERVER, "ssl_certfile", "Certificate chain (PEM): turns TLS on, for HTTP and gRPC.", "router.ssl_certfile"),
    _row(SERVER, "ssl_keyfile", "Its private key (PEM).", "router.ssl_keyfile"),
    _row(SERVER, "ssl_ca_certs", "Only clients with a certificate of these authorities (PEM) may connect.",
         "router.ssl_ca_certs"),
    _row(SERVER, "api_key_file", "YAML list of who may ask, read again when it changes; `paceline keys new` writes it.",
         "router.api_key_file", shown="everybody may"),
    _row(SERVER, "open_routes", f"Routes that need no key, with commas between: any of {', '.join(OPENABLE)}.",
         "router.open_routes", shown="only /health/live"),
    _row(SERVER, "strict", "Refuse requests with fields that nothing reads, instead of naming them in a header.",
         "router.strict"),
    _row(SERVER, "ping_seconds", "Seconds between comments in a stream whose first token is not there yet. 0: none.",
         "router.ping_seconds", least=0),

    _row(LIMITS, "max_waiting_requests", "Requests that may wait in a replica; more are 429. 0: no limit.",
         "replica.max_waiting_requests", least=0),
    _row(LIMITS, "max_waiting_tokens", "Tokens that may wait in a replica; more are 429. 0: no limit.",
         "replica.max_waiting_tokens", least=0),
    _row(LIMITS, "queue_timeout", "Seconds a request may wait before it runs; then 504.", "router.queue_timeout",
         least=0, shown="no limit"),
    _row(LIMITS, "first_token_timeout", "Seconds to the first token; then 504.", "router.first_token_timeout",
         least=0, shown="no limit"),
    _row(LIMITS, "request_timeout", "Seconds a whole request may take; then 504.", "router.request_timeout",
         least=0),
    _row(LIMITS, "drain_seconds", "Seconds that running requests have to finish once a stop was asked for.",
         "router.drain_seconds", "replica.drain_seconds", least=0, commands=SERVING),
    _row(LIMITS, "max_body_bytes", "Largest body of an HTTP request; more is 413.", "router.max_body_bytes", least=1),
    _row(LIMITS, "max_body_values", "Values in one body, such as ids and members of objects.", "router.max_body_values",
         least=1),
    _row(LIMITS, "max_n", "Choices per prompt that a request may ask for.", "router.max_n", least=1),
    _row(LIMITS, "max_prompts", "Prompts in one request.", "router.max_prompts", least=1),
    _row(LIMITS, "max_choices", "Choices in one request: prompts times n.", "router.max_choices", least=1),
    _row(LIMITS, "max_logprobs", "Best tokens beside each that a request may ask for.", "router.max_logprobs", least=0),
    _row(LIMITS, "max_stop", "Stop strings in one request.", "router.max_stop", least=0),
    _row(LIMITS, "max_stop_len", "Characters of one stop string.", "router.max_stop_len", least=1),
    _row(LIMITS, "max_stop_ids", "Stop ids in one request.", "router.max_stop_ids", least=0),
    _row(LIMITS, "max_logit_bias", "Entries of logit_bias.", "router.max_logit_bias", least=0),
    _row(LIMITS, "max_salt_len", "Characters of cache_salt.", "router.max_salt_len", least=1),

    _row(ENGINE, "max_num_seqs", "Sequences that run at once.", "rank.max_num_seqs", least=1),
    _row(ENGINE, "max_num_batched_tokens",
         "Token budget of one step: a higher one suits a GPU.", "rank.max_num_batched_tokens",
         least=1),
    _row(ENGINE, "target_itl",
         "Seconds between a stream's tokens; prompts beside streams are cut to keep it. 0: up to the budget.",
         "replica.target_itl", least=0),
    _row(ENGINE, "long_prefill_token_threshold", "Most tokens that one long prompt takes of a step while others wait.",
         "replica.long_prefill_tokens", least=1, shown="half of the budget"),
    _row(ENGINE, "max_num_partial_prefills", "Long prompts that are in prefill at once.",
         "replica.max_partial_prefills", least=1),
    _row(ENGINE, "enable_prefix_caching", "Reuse the KV cache of equal prefixes.", "replica.enable_prefix_caching"),
    _row(ENGINE, "scheduling_policy", "Who goes first: the request's priority, or first come first served.",
         "replica.scheduling_policy", choices=("priority", "fcfs")),
    _row(ENGINE, "depth", "Plans in flight: 2 plans a step while the one before runs.", "replica.depth", least=1,
         most=16, shown="as many as stages; 2 for several ranks or a GPU, else 1"),
    _row(ENGINE, "attention_backend", "How attention is computed.", "rank.attention_backend",
         choices=("auto", "cpu", "torch")),
    _row(ENGINE, "quantization", "Narrower weights: 8 bits, inputs at 8 too, 4 bits, or as the GGUF file has them.",
         "rank.quantization", choices=("int8", "w8a8", "int4", "gguf"), shown="as the dtype"),
    _row(ENGINE, "step_timeout", "Seconds without a step, while there is work, after which a replica ends itself.",
         "replica.step_timeout", least=0),
    _row(ENGINE, "start_timeout", "Seconds that each phase of the start of several ranks may take.",
         "replica.start_timeout", above=0),

    _row(MEMORY, "block_size", "Tokens per KV block.", "rank.block_size", least=1),
    _row(MEMORY, "num_kv_blocks", "KV blocks in the pool.", "rank.num_kv_blocks", least=1,
         shown="sized from free memory", also=("--num-gpu-blocks-override",)),
    _row(MEMORY, "kv_memory_share", "Share of the memory that is free after the weights.", "rank.kv_memory_share",
         least=0.0, most=1.0, shown="by device", also=("--gpu-memory-utilization",)),
    _row(MEMORY, "tensor_parallel_size", "Ranks that share every layer; they stand on one node.",
         "rank.tensor_parallel_size", least=1, also=("-tp",)),
    _row(MEMORY, "pipeline_parallel_size",
         "Stages that share the layers out; each is as many ranks as --tensor-parallel-size says.",
         "rank.pipeline_parallel_size", least=1, also=("-pp",)),
    _row(MEMORY, "rank_memory", "GiB that one rank may take for weights and KV.", "rank.rank_memory", above=0,
         shown="what its device has"),
    _row(MEMORY, "device", "Where the model runs.", "rank.device", choices=("auto", "cpu", "cuda")),
    _row(MEMORY, "num_threads", "Compute threads per rank.", "rank.num_threads", least=1,
         shown="the cores, shared out"),

    _row(CLUSTER, "replicas", "Replicas to start.", "cluster.num_replicas", least=1),
    _row(CLUSTER, "ray_address", "A running Ray cluster.", "cluster.ray_address",
         shown="a local one that ends with the command"),
    _row(CLUSTER, "controller", "HOST:PORT of the controller that tells where replicas are.", "router.controller",
         commands=("router",)),
    _row(CLUSTER, "replica", "HOST:PORT of a replica; may be given again.", "router.replicas", commands=("router",)),
    _row(CLUSTER, "replicas_dns", "NAME:PORT: every address that the name resolves to is a replica.",
         "router.replicas_dns", commands=("router",)),
    _row(CLUSTER, "routing_policy", "How the router picks a replica.", "router.routing_policy",
         choices=("least_loaded", "round_robin", "power_of_two")),
    _row(CLUSTER, "controller_host", "Address that the controller listens on.", "cluster.host"),
    _row(CLUSTER, "controller_advertise", "Host of the controller that routers are told.", "cluster.advertise",
         commands=("controller",), shown="this machine's address"),
    _row(CLUSTER, "controller_port", "Port of the controller; 0 takes a free one.", "cluster.controller_port",
         least=0, most=65535),
    _row(CLUSTER, "placement_timeout", "Seconds a replica may wait for room before it counts as not placeable.",
         "cluster.placement_timeout", least=0),
    _row(CLUSTER, "replica_host", "Address that the replica listens on.", "replica.host", commands=HOLDS_REPLICAS),
    _row(CLUSTER, "replica_advertise", "Host of the replica that routers are told.", "replica.advertise",
         commands=("replica",), shown="this machine's address"),
    _row(CLUSTER, "replica_port", "Port of the replica; 0 takes a free one.", "replica.port", least=0, most=65535,
         commands=("replica",)),
    _row(CLUSTER, "health_port", "Port of the replica's own health answers.", "replica.health_port",
         least=0, most=65535, commands=("replica",)),
    _row(CLUSTER, "cluster_token_file", "File with the secret that routers, controller and replicas share.",
         commands=SERVING),
    _row(CLUSTER, "plan_dump_dir", "Where a replica leaves its last plans when a step fails.", "rank.dump_dir",
         default="/tmp/paceline"),

    _row(LOGS, "log_format", "Lines for people, or JSON for machines.", "replica.log_format", choices=logs.FORMATS,
         commands=(*SERVING, "bench")),
    _row(LOGS, "log_level", "Least that is logged.", "replica.log_level", choices=logs.LEVELS,
         commands=(*SERVING, "bench")),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}


def of(command: str) -> list[Setting]:
    return [setting for setting in SETTINGS if command in setting.commands]


def resolve(
    command: str, flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any], file_name: str = ""
) -> dict[str, Any]:
    """Values of the command's settings by name: flag, then environment, then file, then the default.

    ``file`` may hold settings of other commands: one file serves all. Raises StartupError.
    """
    values: dict[str, Any] = {}
    for setting in of(command):
        if flags.get(setting.name) is not None:
            values[setting.name] = setting.parse(flags[setting.name], setting.flag)
        elif environ.get(setting.variable):
            values[setting.name] = setting.parse(environ[setting.variable], setting.variable)
        elif file.get(setting.name) is not None:
            values[setting.name] = setting.parse(file[setting.name], f"{file_name}: {setting.name}")
        else:
            values[setting.name] = setting.default
    return values


def make(room: str, values: Mapping[str, Any], **more: Any) -> Any:
    """The room's frozen config out of resolved values; ``more`` are fields that the command works out itself."""
    fields = {
        path.split(".")[1]: values[setting.name]
        for setting in SETTINGS
        for path in setting.into
        if path.startswith(room + ".") and setting.name in values
    }
    return CONFIGS[room](**fields | more)


def read_file(path: Path) -> dict[str, Any]:
    """The config file, flat. Keys are names of settings, alone or grouped in sections. Raises StartupError."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StartupError(f"--config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"--config {path} must hold keys and values")
    flat: dict[str, Any] = {}
    for key, value in _flattened(content):
        if key not in BY_NAME:
            raise StartupError(f"{path}: there is no setting {key!r}{_nearest(str(key), [*BY_NAME, *SECTIONS])}")
        if key in flat:
            raise StartupError(f"{path}: {key} stands there twice")
        flat[key] = value
    return flat


def _flattened(content: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    for key, value in content.items():
        if key in SECTIONS and isinstance(value, dict):
            yield from value.items()
        else:
            yield key, value


def _nearest(name: str, known: list[str]) -> str:
    found = difflib.get_close_matches(name.replace("-", "_"), known, 1, 0.5)
    return f"; the nearest is {found[0]!r}" if found else ""
