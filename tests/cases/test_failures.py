"""What breaks, and who goes away: cases 33, 34 and 35."""

import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc
from tests.cases.stack import Stream, stack

COMPLETIONS = "/v1/completions"
LONG = {"prompt": [5], "max_tokens": 240, "ignore_eos": True}


def test_case_33_a_failure_in_mid_stream_is_one_error_event_and_no_done(folder, caplog):
    with stack(folder) as running, caplog.at_level(logging.WARNING):
        with running.client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
            lines = []
            for line in response.iter_lines():
                lines += [line] if line else []
                if len(lines) == 3:
                    running.executors[0].broken.set()
        stream = Stream(lines)
        assert response.status_code == 200
        assert not stream.done
        assert stream.error
        assert lines.index(next(line for line in lines if '"error"' in line)) == len(lines) - 1
        assert stream.reasons() == []
        request_id = response.headers["x-request-id"]
        assert (
            sum(request_id in record.getMessage() for record in caplog.records if record.name == "paceline.router") == 1
        )


def test_case_33_a_failure_before_the_first_byte_is_a_status(folder):
    with stack(folder) as running:
        running.executors[0].broken.set()
        for body in (LONG, LONG | {"stream": True}):
            response = running.client.post(COMPLETIONS, json=body)
            assert response.status_code in (500, 503)
            assert response.headers["content-type"] == "application/json"
            assert set(response.json()) == {"error"}


def test_case_33_a_prompt_of_which_nothing_has_come_moves_to_another_replica(folder):
    with stack(folder, num_replicas=2) as running:
        expected = running.complete([5], max_tokens=20, ignore_eos=True)["choices"][0]["text"]
        running.executors[0].broken.set()
        for _ in range(4):
            assert running.complete([5], max_tokens=20, ignore_eos=True)["choices"][0]["text"] == expected


class Raw:
    """A client that can hang up at any moment."""

    def __init__(self, running, body: dict):
        host, port = running.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        raw = json.dumps(body).encode()
        fields = ("host: x", "content-type: application/json", f"content-length: {len(raw)}")
        head = "\r\n".join((f"POST {COMPLETIONS} HTTP/1.1", *fields, "", ""))
        self._socket.sendall(head.encode() + raw)

    def read_events(self, count: int) -> None:
        seen = b""
        while seen.count(b"data: ") < count:
            seen += self._socket.recv(65536)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("state", ["after two chunks", "whole", "four choices", "queued", "in its prompt"])
def test_case_34_a_client_that_goes_leaves_nothing_behind(folder, state):
    """Twenty times each; the prover's 300 are line 2.3's."""
    rank = {"max_num_seqs": 2, "max_num_batched_tokens": 16} if state in ("queued", "in its prompt") else {}
    with stack(folder, rank=rank, replica={"enable_prefix_caching": False}) as running:
        for _ in range(20):
            if state == "after two chunks":
                client = Raw(running, LONG | {"stream": True})
                client.read_events(2)
            elif state == "whole":
                client = Raw(running, LONG)
                wait_until(lambda: running.loads()[0].running or time.sleep(0.02) is None)
            elif state == "four choices":
                client = Raw(running, LONG | {"stream": True, "n": 4})
                client.read_events(6)
            elif state == "queued":
                seated = [Raw(running, LONG | {"stream": True}) for _ in range(2)]
                for one in seated:
                    one.read_events(1)
                client = Raw(running, LONG | {"prompt": [7] * 200, "max_tokens": 50})
                time.sleep(0.01)
                client.close()
                time.sleep(0.02)
                for one in seated:
                    one.close()
            else:
                client = Raw(running, LONG | {"prompt": [7] * 200, "max_tokens": 50})
                time.sleep(0.005)
            client.close()
        running.at_rest()
        if state == "queued":
            assert running.loads()[0].prompt_tokens_total < 200


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("end", "status"),
    [("cancel", grpc.StatusCode.CANCELLED), ("deadline", grpc.StatusCode.DEADLINE_EXCEEDED)],
    ids=["cancel", "deadline"],
)
def test_case_34_grpc_the_same(tiny, end, status):
    spec = pb.GenerationSpec(
        token_ids=pb.TokenIds(ids=[5]), sampling=pb.Sampling(max_tokens=240, ignore_eos=True, temperature=0)
    )
    with tiny.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(10):
            timeout = 0.03 if end == "deadline" else None
            call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=timeout)
            if end == "cancel":
                next(call)
                call.cancel()
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
            assert raised.value.code() == status


def test_case_35_two_requests_with_one_id_both_get_their_own_text(tiny):
    expected = {
        prompt: tiny.complete([prompt], max_tokens=20, ignore_eos=True)["choices"][0]["text"] for prompt in (5, 77)
    }
    assert expected[5] != expected[77]

    def ask(prompt: int) -> tuple[int, str, str]:
        body = {"prompt": [prompt], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        response = tiny.client.post(COMPLETIONS, json=body, headers={"x-request-id": "one-for-both"})
        return response.status_code, response.headers["x-request-id"], response.json()["choices"][0]["text"]

    with ThreadPoolExecutor(2) as two:
        for prompt, answer in zip((5, 77), two.map(ask, (5, 77)), strict=True):
            assert answer == (200, "one-for-both", expected[prompt])
