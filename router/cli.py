"""The command line: flags and PACELINE_<FLAG> in, frozen configs out, and whatever a command starts.

The only file that reads the environment, and the only one of the router that reaches into cluster and worker, inside
the command that needs them: `paceline --help` must not wait for torch or ray.
"""

import asyncio
import logging
import os
import signal
import sys
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

from paceline.proto.errors import PacelineError, StartupError

app = typer.Typer(
    name="paceline",
    help="Serve large language models: OpenAI-compatible HTTP in front of replicas on Ray.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(stderr=True, highlight=False)

MODEL, SERVER, ENGINE, MEMORY, CLUSTER = "Model", "Server", "Engine", "Memory and device", "Cluster"


def flag(panel: str, text: str, name: str, *more: str, metavar: str | None = None, **kwargs: Any) -> Any:
    """An option that PACELINE_<NAME> sets too. Numbers with a range are shown as N: the range is in the error."""
    if "min" in kwargs:
        metavar = metavar or "N"
    variable = "PACELINE_" + name.split("/")[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(
        name, *more, help=text, rich_help_panel=panel, envvar=variable, show_envvar=False, metavar=metavar, **kwargs
    )


ModelFlag = Annotated[
    str, flag(MODEL, "Folder, .gguf file, Hub id (org/name), or the built-in name smollm2.", "--model", "-m")
]


@app.command()
def serve(
    model: ModelFlag = "smollm2",
    served_model_name: Annotated[
        str | None, flag(MODEL, "Name that clients use. Default: the last part of --model.", "--served-model-name")
    ] = None,
    dtype: Annotated[str, flag(MODEL, "auto, float32, bfloat16 or float16.", "--dtype")] = "auto",
    max_model_len: Annotated[
        int | None, flag(MODEL, "Longest prompt plus answer, in tokens. Default: the model's own.", "--max-model-len")
    ] = None,
    chat_template: Annotated[
        Path | None, flag(MODEL, "File with a Jinja template that replaces the model's.", "--chat-template")
    ] = None,
    host: Annotated[str, flag(SERVER, "Address to listen on.", "--host")] = "127.0.0.1",
    port: Annotated[int, flag(SERVER, "Port of the HTTP API; 0 takes a free one.", "--port", min=0, max=65535)] = 8000,
    max_num_seqs: Annotated[int, flag(ENGINE, "Sequences that run at once.", "--max-num-seqs", min=1)] = 64,
    max_num_batched_tokens: Annotated[
        int,
        flag(
            ENGINE,
            "Token budget of one step: lower keeps streams smooth, higher suits a GPU.",
            "--max-num-batched-tokens",
            min=1,
        ),
    ] = 256,
    long_prefill_token_threshold: Annotated[
        int | None,
        flag(
            ENGINE,
            "Most tokens that one long prompt takes of a step while others wait. Default: half of the budget.",
            "--long-prefill-token-threshold",
            min=1,
        ),
    ] = None,
    max_num_partial_prefills: Annotated[
        int, flag(ENGINE, "Long prompts that are in prefill at once.", "--max-num-partial-prefills", min=1)
    ] = 2,
    enable_prefix_caching: Annotated[
        bool,
        flag(ENGINE, "Reuse the KV cache of equal prefixes.", "--enable-prefix-caching/--no-enable-prefix-caching"),
    ] = True,
    scheduling_policy: Annotated[str, flag(ENGINE, "priority or fcfs.", "--scheduling-policy")] = "priority",
    depth: Annotated[
        int, flag(ENGINE, "Plans in flight: 2 overlaps planning with a GPU's step.", "--depth", min=1, max=2)
    ] = 1,
    attention_backend: Annotated[str, flag(ENGINE, "auto or torch.", "--attention-backend")] = "auto",
    block_size: Annotated[int, flag(MEMORY, "Tokens per KV block.", "--block-size", min=1)] = 16,
    num_kv_blocks: Annotated[
        int | None,
        flag(
            MEMORY,
            "KV blocks in the pool. Default: sized from free memory.",
            "--num-kv-blocks",
            "--num-gpu-blocks-override",
            min=1,
        ),
    ] = None,
    kv_memory_share: Annotated[
        float | None,
        flag(
            MEMORY,
            "Share of the memory that is free after the weights.",
            "--kv-memory-share",
            "--gpu-memory-utilization",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    device: Annotated[str, flag(MEMORY, "auto, cpu or cuda.", "--device")] = "auto",
    num_threads: Annotated[
        int | None, flag(MEMORY, "Compute threads per replica. Default: the cores, shared out.", "--num-threads", min=1)
    ] = None,
    replicas: Annotated[int, flag(CLUSTER, "Replicas to start.", "--replicas", min=1)] = 1,
    ray_address: Annotated[
        str | None,
        flag(CLUSTER, "A running Ray cluster. Default: a local one that ends with this command.", "--ray-address"),
    ] = None,
    plan_dump_dir: Annotated[
        Path, flag(CLUSTER, "Where a replica leaves its last plans when a step fails.", "--plan-dump-dir")
    ] = Path("/tmp/paceline"),
) -> None:
    """Serve a model on this machine: router, controller and replicas in one command.

    [bold]paceline serve[/bold] starts the built-in model; [bold]paceline serve -m ./my-model[/bold] your own.

    Every flag can also be set in the environment: [bold]PACELINE_MAX_NUM_SEQS=32[/bold] is --max-num-seqs 32.
    """
    from paceline.cluster.config import ClusterConfig, ReplicaConfig
    from paceline.router.config import RouterConfig
    from paceline.worker.config import RankConfig
    from paceline.worker.threads import available

    with _one_sentence():
        path = _resolve(model)
        rank = RankConfig(
            model=str(path),
            served_model_name=served_model_name or _name_of(model),
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_memory_share=kv_memory_share,
            attention_backend=attention_backend,
            num_threads=num_threads or max(1, available() // replicas),
            dump_dir=str(plan_dump_dir),
        )
        replica = ReplicaConfig(
            rank=rank,
            long_prefill_tokens=long_prefill_token_threshold,
            max_partial_prefills=max_num_partial_prefills,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            depth=depth,
        )
        cluster = ClusterConfig(replica=replica, num_replicas=replicas, ray_address=ray_address)
        router = RouterConfig(host=host, port=port, chat_template=_read(chat_template))
        _serve(cluster, router)


def _serve(cluster_config: Any, router_config: Any) -> None:
    """Cluster first, then the port: nothing listens before a replica serves."""
    import msgspec

    if not cluster_config.ray_address:
        os.environ |= _local_ray_environment()
    from paceline.cluster.launch import Cluster

    _log_to_console()
    _print_config(cluster_config, router_config)
    cluster = Cluster(cluster_config)
    try:
        with _interruptible(), console.status("starting Ray") as status:
            address, loaded = cluster.start(lambda states: status.update(_progress_line(states)))
        for line in loaded:
            console.print(line, soft_wrap=True)
        router_config = msgspec.structs.replace(router_config, controller=address)
        asyncio.run(_route(router_config, cluster_config.replica.rank.served_model_name))
    except KeyboardInterrupt:
        console.print("interrupted")
    finally:
        with _uninterruptible():
            cluster.stop()
    console.print("stopped")


async def _route(config: Any, model_name: str) -> None:
    """The router until the first SIGINT or SIGTERM; a second one ends the process at once."""
    from paceline.router.app import serve_router

    stop = asyncio.Event()

    def stopped() -> None:
        if stop.is_set():
            os._exit(130)
        console.print("stopping")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped)
    await serve_router(config, ready=lambda url: _greet(url, model_name), stop=stop)


@app.command()
def pull(model: Annotated[str, typer.Argument(help="Hub id (org/name) or the built-in name smollm2.")]) -> None:
    """Fetch a model into the cache, so that serve starts without a network. Prints its path."""
    with _one_sentence():
        print(_resolve(model))


@app.command()
def replay(
    file: Annotated[
        Path, typer.Argument(help="A dump that a rank left in --plan-dump-dir.", exists=True, dir_okay=False)
    ],
    model: Annotated[str | None, typer.Option(help="Model to run it on. Default: the one named in the dump.")] = None,
) -> None:
    """Run a rank's last plans again on the reference backend, one line of ids per step."""
    from paceline.worker.replay import replay as run

    with _one_sentence():
        for step in run(file, str(_resolve(model)) if model else None):
            print(step)


@app.command()
def version() -> None:
    """Print the version."""
    print(installed_version("paceline"))


# -- pieces ------------------------------------------------------------------------------------------------------------


@contextmanager
def _one_sentence():
    """What cannot start says why in one sentence and exits with 1."""
    try:
        yield
    except PacelineError as error:
        console.print(f"[red]paceline:[/red] {error}", soft_wrap=True, markup=True)
        raise typer.Exit(1) from None


@contextmanager
def _interruptible():
    """SIGTERM interrupts a blocking start as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _uninterruptible():
    """Impatience must not leave processes behind."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _local_ray_environment() -> dict[str, str]:
    """What Ray reads when it is imported. A token for this run: Ray's ports run code for whoever may speak to them."""
    import secrets

    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


def _resolve(model: str) -> Path:
    from paceline.worker.sources import resolve

    cache = os.environ.get("PACELINE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    cache_dir = Path(cache) / "paceline" / "models" if cache else None
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def report(description: str, done: int, total: int | None) -> None:
            if description not in tasks:
                tasks[description] = progress.add_task(description, total=total)
            progress.update(tasks[description], completed=done, total=total)

        return resolve(model, report, cache_dir)


def _name_of(model: str) -> str:
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name or model


def _read(path: Path | None) -> str | None:
    try:
        return path.read_text() if path else None
    except OSError as error:
        raise StartupError(f"--chat-template {path} cannot be read: {error.strerror}") from error


def _log_to_console() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("grpc").setLevel(logging.WARNING)


def _print_config(*configs: Any) -> None:
    """The resolved config, once, with a hash by which two servers can be told apart."""
    import hashlib

    import msgspec

    text = b" ".join(msgspec.json.encode(config) for config in configs)
    console.print(
        f"config {hashlib.sha256(text).hexdigest()[:12]} {text.decode()}", style="dim", markup=False, soft_wrap=True
    )


def _progress_line(states: dict[str, str]) -> str:
    return ", ".join(f"{name} {state}" for name, state in states.items()) or "starting"


def _greet(url: str, model_name: str) -> None:
    import json

    body = {"model": model_name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    print(f"paceline serves {model_name} on {url}")
    print(f"try:\n  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'")
    sys.stdout.flush()


def main() -> None:
    app()
