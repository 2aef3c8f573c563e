"""One command, a real model, real clients. One server for the whole file."""

import json
import subprocess
import time

import httpx
import openai
import psutil
import pytest

from tests.e2e.conftest import PROMPTS
from tests.e2e.server import our_processes, run_to_its_end, serving, start
from tests.models import tiny_llama_folder

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2_path):
    with serving(tmp_path_factory.mktemp("serve") / "log", "--num-threads", "1", "--max-model-len", "2048") as server:
        yield server


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60, max_retries=0)


def test_the_curl_line_that_serve_prints_answers_paris(server):
    printed = server.log.read_text()
    lines = printed[printed.index("  curl ") :].splitlines()[:2]
    command = "\n".join(lines).replace('{"model"', '{"temperature": 0, "model"')
    done = subprocess.run(
        ["bash", "-c", command.replace("curl ", "curl -sS ")], capture_output=True, text=True, timeout=60
    )
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"], done


def test_the_openai_client_streams_the_same_answer_that_it_gets_whole(client):
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=30)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_korean_streams_without_a_broken_character(client):
    hangul = 0
    for prompt in PROMPTS[5:]:
        options = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 64}
        pieces = [c.choices[0].text for c in client.completions.create(**options, stream=True) if c.choices]
        whole = client.completions.create(**options).choices[0].text
        assert "".join(pieces) == whole
        assert not any("\ufffd" in piece for piece in pieces)
        hangul += sum("가" <= character <= "힣" for character in whole)
    assert hangul > 20  # each of them is three bytes and, in this vocabulary, often as many tokens


def test_a_repeated_prompt_reports_its_cached_tokens(client):
    prompt = list(range(2000, 2050))
    for cached in (0, 48):
        done = client.completions.create(model="smollm2", prompt=prompt, max_tokens=2, temperature=0)
        assert done.usage.prompt_tokens_details.cached_tokens == cached


def test_n_choices_in_order_with_the_prompt_counted_once(client):
    done = client.completions.create(model="smollm2", prompt=["One", "Two"], n=3, max_tokens=4, seed=1)
    assert [choice.index for choice in done.choices] == list(range(6))
    assert done.usage.completion_tokens <= 24


def test_a_stop_string_ends_the_text_before_it(client):
    options = {"model": "smollm2", "prompt": "One, two, three,", "temperature": 0, "max_tokens": 30}
    text = client.completions.create(**options).choices[0].text
    stop = text[5:12]
    done = client.completions.create(**options, stop=[stop]).choices[0]
    assert done.text == text[: text.index(stop)]
    assert done.finish_reason == "stop"


def test_a_field_that_is_not_supported_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=QUESTION, tools=[{"type": "function"}])
    assert caught.value.param == "tools"


def test_a_closed_connection_gives_its_blocks_back(server):
    body = {"model": "smollm2", "prompt": list(range(300, 400)), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data:")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if metric(server, "requests_running") == metric(server, "kv_blocks_used") == 0:
            return
        time.sleep(0.1)
    raise AssertionError("blocks are still in use")


def test_a_replica_gives_way_to_others_no_more_than_the_router_does(server):
    router = psutil.Process(server.process.pid)
    family = {process.name(): process.nice() for process in router.children(recursive=True)}
    replicas = [nice for name, nice in family.items() if name.startswith("ray::Replica")]
    assert replicas == [router.nice()]


def test_the_phases_of_the_start_are_in_the_metrics_and_in_the_log(server):
    lines = httpx.get(server.url + "/metrics", timeout=10).text.splitlines()
    told = [line.split('phase="')[1].split('"')[0] for line in lines if line.startswith("paceline_start_seconds{")]
    whole = {"imports", "ray", "controller", "replicas", "attach"}
    assert set(told) == whole | {"open", "weights", "kv pool", "card", "warm-up"}
    assert told.count("imports") == 2  # of the command and of the replica
    log = server.log.read_text()
    assert all(f"start: {phase} took" in log for phase in whole)


def metric(server, name: str) -> float:
    text = httpx.get(server.url + "/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"paceline_engine_{name}{{"))


def test_sigint_in_mid_stream_exits_0_and_leaves_no_process(tmp_path, smollm2_path):
    before = our_processes()
    server = start(tmp_path / "log", "--num-threads", "1", "--num-kv-blocks", "256", "--replicas", "2")
    body = {"model": "smollm2", "prompt": [1000] * 8, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
        assert server.interrupt() == 0
    assert our_processes() <= before


def break_config(folder):
    (folder / "config.json").write_text('{"architectures": ["Zebra"], "model_type": "zebra"}')


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize(("spoil", "word"), [(break_config, "ebra"), (truncate, "model.safetensors")])
def test_a_model_that_cannot_load_ends_the_start_with_one_sentence(tmp_path, spoil, word):
    folder = tiny_llama_folder(tmp_path / "model")
    spoil(folder)
    done = run_to_its_end("serve", "--model", str(folder), "--port", "0")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("paceline:")]
    assert len(said) == 1
    assert word in said[0]
    assert "Traceback" not in done.stderr
    assert "serves" not in done.stdout


def test_help_and_version_answer_without_torch_or_ray():
    code = "import sys; from paceline.router import cli; assert not {'torch', 'ray', 'numpy'} & set(sys.modules)"
    assert run_to_its_end("version").stdout.strip()
    assert "--max-num-batched-tokens" in run_to_its_end("serve", "--help").stdout
    import sys

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
