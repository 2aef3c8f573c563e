"""The command line as a user meets it: help that can be read, and processes that start, stop and say why not."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import venv
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from paceline.router import settings
from paceline.router.keys import entry_of, hash_of, parse_keys
from tests.fakes import FakeReplica
from tests.router.conftest import ready, running_router, until

ROOT = Path(__file__).resolve().parents[2]
PACELINE = str(Path(sys.executable).with_name("paceline"))
COMMANDS = (
    "serve", "router", "controller", "replica", "bench", "chat", "status", "keys", "pull", "models", "fits", "replay",
    "version",
)  # fmt: skip


def run(
    *arguments: str, command: str = PACELINE, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "80"} | variables
    return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60, env=env, input=stdin)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_cuts_nothing_off(command):
    text = run(command, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for setting in settings.of(command):
        flag = setting.flag if setting.type is not bool else f"--[no-]{setting.flag[2:]}"
        assert re.search(rf"^  (-\w+, )?{re.escape(flag)}( |$)", text, re.MULTILINE), flag


def test_the_first_help_names_every_command():
    text = run("--help").stdout
    assert all(re.search(rf"^  {command} +\w", text, re.MULTILINE) for command in COMMANDS)
    assert "..." not in text.split("Commands:")[1]


def test_a_router_needs_to_know_where_replicas_are():
    done = run("router")
    assert done.returncode == 1
    assert "--controller" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_more_ranks_than_this_machine_can_run_are_refused_before_the_model_is_looked_at():
    done = run("replica", "--model", "/nowhere", "-tp", "512", "-pp", "8")
    assert done.returncode == 1
    assert "--tensor-parallel-size 512 x --pipeline-parallel-size 8 makes 4096 ranks" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_config_file_with_a_wrong_key_ends_the_start_with_one_sentence(tmp_path):
    path = tmp_path / "paceline.yaml"
    path.write_text("max_num_sequences: 4\n")
    done = run("router", "--config", str(path), "--replica", "a:1")
    assert done.returncode == 1
    assert "max_num_seqs" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_cluster_token_is_read_from_its_file_and_never_printed(tmp_path):
    token = tmp_path / "token"
    token.write_text("blue-heron\n")
    process, url = started([PACELINE, "router", "--port", "0", "--replica", "127.0.0.1:9", "--log-format", "json",
                            "--cluster-token-file", str(token)], tmp_path / "log")  # fmt: skip
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    said = (tmp_path / "log").read_text()
    assert "cluster_token" in said
    assert "blue-heron" not in said
    assert url


@pytest.mark.parametrize(
    ("flags", "word"),
    [(["--api-key-file", "/nowhere/keys.yaml"], "--api-key-file"), (["--open-routes", "/v1/models"], "--open-routes")],
)
def test_mistakes_about_keys_are_told_before_the_model_is_looked_at(flags, word):
    done = run("serve", "--model", "/nowhere", *flags)
    assert done.returncode == 1
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_new_key_goes_to_stderr_and_its_entry_to_stdout(tmp_path):
    done = run("keys", "new", "--tenant", "acme", "--priority", "-1")
    key = done.stderr.strip()
    assert re.fullmatch(r"pl-[\w-]{43}", key)
    assert key not in done.stdout
    [(hashed, entry)] = parse_keys(done.stdout, "keys.yaml").items()
    assert (hashed, entry.tenant, entry.best_priority) == (hash_of(key), "acme", -1)
    again = run("keys", "new", "--tenant", "x" * 200)
    assert again.returncode == 1
    assert again.stdout == ""
    assert "tenant" in again.stderr


async def test_chat_and_status_show_a_key_from_the_environment_or_a_file(tmp_path):
    (tmp_path / "keys.yaml").write_text(entry_of("pl-right", tenant="acme"))
    (tmp_path / "key").write_text("pl-right\n")
    file = {"api_key_file": str(tmp_path / "keys.yaml"), "open_routes": ("/health/ready",)}
    async with FakeReplica() as replica, running_router(replica.address, **file) as http:
        url = ["--url", str(http.base_url)]
        status = await asyncio.to_thread(run, "status", "--once", *url, "--key-file", str(tmp_path / "key"))
        assert replica.replica_id in status.stdout
        chat = await asyncio.to_thread(run, "chat", *url, PACELINE_API_KEY="pl-right", stdin="hi\n")
        assert chat.stdout == "Hello world.\n"
        refused = await asyncio.to_thread(run, "status", "--once", *url, PACELINE_API_KEY="pl-wrong")
        assert refused.returncode == 1
        assert all(word in refused.stderr for word in ("not known", "PACELINE_API_KEY", "--key-file"))
        assert "pl-wrong" not in refused.stderr


def started(command: list[str], log: Path) -> tuple[subprocess.Popen, str]:
    """The process and the URL that it says it listens on."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd="/")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"listening on (https?://[^\s\"]+)", log.read_text()):
            return process, found[1]
        time.sleep(0.05)
    process.kill()
    raise AssertionError(log.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_idle_router_with_0(tmp_path, number):
    process, _ = started([PACELINE, "router", "--port", "0", "--replica", "127.0.0.1:9"], tmp_path / "log")
    process.send_signal(number)
    assert process.wait(10) == 0
    assert "stopped" in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    """A virtual environment with what a router depends on, and nothing else. It needs no compiler."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", str(ROOT)]
    subprocess.run(pip, check=True, timeout=240, env=os.environ | {"CC": "false", "CXX": "false"})
    return python


def test_router_chat_and_status_start_without_torch_and_ray(bare_python, tmp_path):
    code = "import importlib.util as u; assert not any(map(u.find_spec, ('torch', 'ray', 'numpy', 'httpx')))"
    subprocess.run([bare_python, "-c", code], check=True, timeout=20)
    paceline = str(bare_python.with_name("paceline"))
    process, url = started([paceline, "router", "--port", "0", "--replica", "127.0.0.1:9"], tmp_path / "log")
    try:
        assert run("status", "--url", url, command=paceline).stdout.startswith("replica\t")  # once, without a terminal
        assert "no replica" in run("chat", "--url", url, command=paceline).stderr
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


@asynccontextmanager
async def streaming_router(tmp_path, *flags: str):
    """A router process in front of a slow replica, with one stream open: (process, lines of the stream)."""
    async with FakeReplica(text="one two three four five six", delay=0.2) as replica:
        command = [PACELINE, "router", "--port", "0", "--replica", replica.address, *flags]
        process, url = await asyncio.to_thread(started, command, tmp_path / "log")
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            try:
                await until(lambda: ready(client))
                body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 20, "ignore_eos": True}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    lines = response.aiter_lines()
                    assert (await anext(lines)).startswith("data:")
                    yield process, lines
            finally:
                process.kill()


async def test_the_first_signal_lets_a_stream_end_and_exits_with_0(tmp_path):
    async with streaming_router(tmp_path, "--drain-seconds", "20") as (process, lines):
        process.send_signal(signal.SIGTERM)
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert await asyncio.to_thread(process.wait, 10) == 0


async def test_the_second_signal_ends_it_at_once(tmp_path):
    async with streaming_router(tmp_path, "--drain-seconds", "20") as (process, lines):
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGINT)
        rest = [line async for line in lines if line]
        assert '"error"' in rest[-1]
        assert await asyncio.to_thread(process.wait, 5) == 0
