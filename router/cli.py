"""The command line: settings in, frozen configs out, and whatever a command starts.

The only file that reads the environment. Cluster and worker are imported inside the command that needs them, here and
in `process.py`: `paceline --help` must not wait for torch or ray. What can be set is `settings.py`.
"""

import hashlib
import json
import logging
import math
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

from paceline.proto import logs
from paceline.proto.errors import PacelineError, StartupError
from paceline.router import keys as api_keys
from paceline.router import process, settings
from paceline.router.auth import Guard
from paceline.router.flags import Command, takes_settings
from paceline.router.keyring import keyring_of

app = typer.Typer(
    name="paceline",
    help="Serve large language models: OpenAI-compatible HTTP and gRPC in front of replicas on Ray.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(stderr=True, highlight=False)
log = logging.getLogger("paceline")

MOST_RANKS_PER_CORE = 8  # a rank takes some hundred megabytes before it has read a weight

Values = dict[str, Any]  # of settings, by name


# -- what serves -------------------------------------------------------------------------------------------------------


@app.command(cls=Command)
@takes_settings("serve")
def serve(flags: Values, config: Path | None) -> None:
    """Serve a model: router, controller and replicas in one command.

    `paceline serve` starts the built-in model; `paceline serve -m ./my-model` your own.

    Every flag is also a variable and a key of the file that --config names: --max-num-seqs 32 is
    PACELINE_MAX_NUM_SEQS=32 and `max_num_seqs: 32`. A flag beats the variable, the variable the file.
    """
    with _one_sentence():
        values = _begin("serve", flags, config)
        if not values["ray_address"]:  # on a Ray that goes on, the next command must know the token too
            values["cluster_token"] = values["cluster_token"] or secrets.token_hex(32)
        router_config = _router_config(values)
        cluster = _cluster_config(values)
        _print_config(cluster, router_config)
        process.serve_all(cluster, router_config, console)


@app.command(cls=Command)
@takes_settings("router")
def router(flags: Values, config: Path | None) -> None:
    """Only the front: HTTP and gRPC for replicas elsewhere. Needs neither torch nor ray.

    Replicas come from --controller, from --replica (again for each) or from --replicas-dns.
    """
    with _one_sentence():
        values = _begin("router", flags, config)
        if not (values["controller"] or values["replica"] or values["replicas_dns"]):
            raise StartupError("a router needs --controller, --replica or --replicas-dns to find replicas")
        router_config = _router_config(values)
        _print_config(router_config)
        process.run(process.route(router_config))


@app.command(cls=Command)
@takes_settings("controller")
def controller(flags: Values, config: Path | None) -> None:
    """Only the controller: starts replicas on Ray and watches them.

    Routers ask it where they are: `paceline router --controller HOST:PORT`. Started again, it takes over what runs.
    """
    with _one_sentence():
        values = _begin("controller", flags, config)
        cluster_config = _cluster_config(values)
        _print_config(cluster_config)
        process.run_controller(cluster_config)


@app.command(cls=Command)
@takes_settings("replica")
def replica(flags: Values, config: Path | None) -> None:
    """Only one replica, without Ray.

    For `paceline router --replica HOST:PORT`, for tests and plain deployments.
    """
    with _one_sentence():
        values = _begin("replica", flags, config)
        replica_config = _replica_config(values)
        _print_config(replica_config)
        process.run_replica(replica_config)


# -- who asks ----------------------------------------------------------------------------------------------------------

Url = Annotated[
    str, typer.Option(help="Where the router listens.", envvar="PACELINE_URL", metavar="URL", show_default=False)
]
CaFile = Annotated[
    Path | None, typer.Option("--ssl-ca-certs", help="Authorities (PEM) to check the server with.", metavar="FILE")
]
KeyFile = Annotated[
    Path | None, typer.Option(help="File with the API key and nothing else. [PACELINE_API_KEY]", metavar="FILE")
]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command(cls=Command)
def chat(
    url: Url = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Name of the model. [the first served]", metavar="NAME")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.", metavar="TEXT")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", metavar="N", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest.", metavar="X")] = None,
    key_file: KeyFile = None,
    ssl_ca_certs: CaFile = None,
) -> None:
    """Talk to a running server in this terminal. /reset forgets what was said, /quit ends; Ctrl-C ends an answer."""
    from paceline.router.chat_cli import Chat

    with _one_sentence():
        options = {"max_tokens": max_tokens, "temperature": temperature}
        client = _client(url, ssl_ca_certs, key_file)
        Chat(client, model, system, {k: v for k, v in options.items() if v is not None}).run()


@app.command(cls=Command)
def status(
    url: Url = DEFAULT_URL,
    controller: Annotated[
        str | None, typer.Option(help="HOST:PORT of the controller: adds replicas that do not serve.", metavar="TEXT")
    ] = None,
    cluster_token_file: Annotated[
        Path | None, typer.Option(help="File with the cluster's secret, for --controller.", metavar="FILE")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print plain lines and end, as without a terminal.")] = False,
    key_file: KeyFile = None,
    ssl_ca_certs: CaFile = None,
) -> None:
    """A live table of the replicas and of what they do.

    State, requests running and waiting, KV blocks in use, generated tokens per second.
    """
    from paceline.router.status_cli import Status

    with _one_sentence():
        client = _client(url, ssl_ca_certs, key_file)
        source = Status(client, controller, _secret("cluster_token_file", cluster_token_file))
        source.print_once() if once or not sys.stdout.isatty() else source.watch()


def _client(url: str, ca_file: Path | None, key_file: Path | None) -> Any:
    from paceline.router.client import Client

    key = _secret("key_file", key_file) or os.environ.get("PACELINE_API_KEY")
    return Client(url, str(ca_file) if ca_file else None, key)


@app.command(cls=Command)
@takes_settings("bench")
def bench(flags: Values, config: Path | None) -> None:
    """Measure the speed of a server or an engine.

    Throughput, latencies and, with --slo, the most load within limits.

    `paceline bench` asks the server at --url; the name of its model is --served-model-name, or the first that it tells.
    `paceline bench --engine -m ./my-model` loads a model as `paceline replica` does, and takes the same flags.

    With --slo ttft=1s,itl=100ms it searches for goodput: the most requests a second, and the most streams at once, with
    the 99th percentile of both within the limits.

    The exit status is 1 if a request failed or an answer was short.
    """
    with _one_sentence():
        from paceline.router.bench_cli import check

        values = _begin("bench", flags, config)
        bench_config = settings.make("bench", values)
        check(bench_config)
        out = Console(highlight=False)
        if bench_config.engine:
            process.run(process.bench_engine(bench_config, out, _replica_config(values)))
        else:
            key = _secret("key_file", values["key_file"]) or os.environ.get("PACELINE_API_KEY")
            process.run(process.bench_server(bench_config, out, values["served_model_name"], key))


# -- keys --------------------------------------------------------------------------------------------------------------

keys = typer.Typer(help="API keys: who may ask a server started with --api-key-file.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.command("new", cls=Command)
def new_key(
    tenant: Annotated[str, typer.Option(help="Whose it is: what waits is shared out between tenants.", metavar="NAME")],
    priority: Annotated[
        int | None, typer.Option(help="Lowest number that it may ask for; lower runs first. [any]", metavar="N")
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="Keys with the same one share cached prompts. [the key's own]", metavar="TEXT")
    ] = None,
) -> None:
    """Make an API key.

    Its entry for the file goes to stdout (append it: >> keys.yaml), the key itself to stderr. It is shown this once:
    the file holds its hash only.
    """
    with _one_sentence():
        key = api_keys.fresh()
        entry = api_keys.entry_of(key, tenant, priority, cache_salt)
        api_keys.parse_keys(entry, "the new entry")
        print(entry, end="")
        console.print(key, markup=False, soft_wrap=True)


# -- tools -------------------------------------------------------------------------------------------------------------


@app.command(cls=Command)
def pull(model: Annotated[str, typer.Argument(help="Hub id (org/name) or the built-in name smollm2.")]) -> None:
    """Fetch a model, so that serve starts without a network. Prints its path."""
    with _one_sentence():
        print(_resolve(model))


@app.command(cls=Command)
def models() -> None:
    """List the models that can be served.

    Families, the GGUF files they come in, and the fallback for all others.
    """
    from paceline.router.models_cli import models_text
    from paceline.worker.supported import supported

    print(models_text(supported()))


@app.command(cls=Command)
def fits(
    model: Annotated[str, typer.Argument(help="Folder, config.json, .gguf file or Hub id. Weights are not needed.")],
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share each layer.", metavar="N", min=1)
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "-pp", help="Stages that share the layers.", metavar="N", min=1)
    ] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(help="H200, H100, A100, L40S, or GiB that a rank may take. [each of them]", metavar="NAME"),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus answer. [the model's own]", metavar="N", min=1)
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type that the model computes in.", metavar="NAME")] = "auto",
    device: Annotated[str, typer.Option(help="Where it is to run: cuda or cpu.", metavar="NAME")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each GPU.")] = False,
) -> None:
    """Tell whether a model fits a GPU.

    Weights, KV cache and full-length requests are counted from its config alone. Where it does not fit, the smallest
    sizes that do are suggested.
    """
    with _one_sentence():
        from paceline.router.models_cli import fit_json, fit_text
        from paceline.worker.config import RankConfig
        from paceline.worker.fits import GPUS, read_model
        from paceline.worker.fits import fits as fit

        spec = read_model(_resolve(model, config_only=True))
        config = RankConfig(
            model=model,
            served_model_name=_name_of(model),
            dtype=dtype,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        )
        for name in [gpu] if gpu else GPUS:
            print((fit_json if as_json else fit_text)(fit(spec, config, name, device)))


@app.command(cls=Command)
def replay(
    file: Annotated[
        Path, typer.Argument(help="A dump that a rank left in --plan-dump-dir.", exists=True, dir_okay=False)
    ],
    model: Annotated[
        str | None, typer.Option(help="Model to run it on. [the one named in the dump]", metavar="TEXT")
    ] = None,
) -> None:
    """Run a rank's last plans again on the reference backend.

    Prints one line of ids per step.
    """
    from paceline.worker.replay import replay as run

    with _one_sentence():
        for step in run(file, str(_resolve(model)) if model else None):
            print(step)


@app.command(cls=Command)
def version() -> None:
    """Print the version."""
    print(installed_version("paceline"))


# -- configs -----------------------------------------------------------------------------------------------------------


def _begin(command: str, flags: Values, file: Path | None) -> Values:
    """Every setting of the command with its value; from here on the process logs as it was told to."""
    content = settings.read_file(file) if file else {}
    values = settings.resolve(command, flags, os.environ, content, str(file))
    values["cluster_token"] = _secret("cluster_token_file", values.get("cluster_token_file"))
    logs.configure(values["log_format"], values["log_level"])
    return values


def _router_config(values: Values) -> Any:
    config = settings.make(
        "router",
        values,
        chat_template=_read("chat_template", values["chat_template"]),
        cluster_token=values["cluster_token"],
    )
    Guard(keyring_of(config.api_key_file), config.open_routes)  # a mistake here must not wait for a model to load
    return config


def _replica_config(values: Values) -> Any:
    from paceline.worker.threads import available

    num_threads = values["num_threads"]
    if not values.get("ray_address"):  # other machines have cores of their own
        num_cores = available()
        num_ranks = _num_ranks_here(values, num_cores)
        num_threads = num_threads or max(1, num_cores // num_ranks)
    rank = settings.make(
        "rank",
        values,
        model=str(_resolve(values["model"])),
        served_model_name=values["served_model_name"] or _name_of(values["model"]),
        num_threads=num_threads,
    )
    return settings.make("replica", values, rank=rank, cluster_token=values["cluster_token"])


def _cluster_config(values: Values) -> Any:
    return settings.make("cluster", values, replica=_replica_config(values))


def _num_ranks_here(values: Values, num_cores: int) -> int:
    """Each is a process on this machine. Raises StartupError for more than it can run."""
    sizes = {name: values.get(name, 1) for name in ("replicas", "tensor_parallel_size", "pipeline_parallel_size")}
    num_ranks, most = math.prod(sizes.values()), MOST_RANKS_PER_CORE * num_cores
    if num_ranks > most:
        flags = " x ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items() if size > 1)
        raise StartupError(f"{flags} makes {num_ranks} ranks: this machine of {num_cores} cores runs at most {most}")
    return num_ranks


def _read(name: str, path: str | Path | None) -> str | None:
    try:
        return Path(path).read_text() if path else None
    except OSError as error:
        raise StartupError(f"--{name.replace('_', '-')} {path} cannot be read: {error.strerror}") from error


def _secret(name: str, path: str | Path | None) -> str | None:
    text = (_read(name, path) or "").strip()
    if path and not text:
        raise StartupError(f"--{name.replace('_', '-')} {path} is empty")
    return text or None


def _name_of(model: str) -> str:
    path = Path(model)
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem) if path.suffix == ".gguf" else path.name or model


def _print_config(*configs: Any) -> None:
    """The resolved config, once, with a hash by which two servers can be told apart; secrets are in neither."""
    shown = [_without_secrets(msgspec.to_builtins(config)) for config in configs]
    digest = hashlib.sha256(msgspec.json.encode(shown)).hexdigest()[:12]
    log.info("config %s %s", digest, json.dumps(shown if len(shown) > 1 else shown[0]))


def _without_secrets(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: "***" if key.endswith("token") and inner else _without_secrets(inner) for key, inner in value.items()}


# -- pieces ------------------------------------------------------------------------------------------------------------


@contextmanager
def _one_sentence() -> Iterator[None]:
    """What cannot start says why in one sentence and exits with 1."""
    try:
        yield
    except PacelineError as error:
        console.print(f"[red]paceline:[/red] {_escaped(str(error))}", soft_wrap=True, markup=True)
        raise typer.Exit(1) from None


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")


def _resolve(model: str, config_only: bool = False) -> Path:
    from paceline.worker.sources import resolve, resolve_config

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

        return (resolve_config if config_only else resolve)(model, report, cache_dir)


def main() -> None:
    app()
