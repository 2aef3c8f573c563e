"""Bodies, names and unknown fields: cases 24 and 26."""

import pytest

from tests.cases.stack import stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = [
    b"[]",
    b"null",
    b"123",
    b'"x"',
    b'{"model":',
    b"",
    b"\xff\xfe{}",
    b'{"prompt": "\xc3"}',
    b"{}" * 2,
    b"[" * 100_000,
    b'{"a":' * 5000,
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/render"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:12]))
def test_case_24_what_is_no_json_object_is_refused(tiny, path, body):
    response = tiny.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
def test_case_24_another_content_type_is_refused(tiny, path, kind):
    response = tiny.client.post(path, content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


def test_case_24_no_content_type_is_taken_as_json(tiny):
    request = tiny.client.build_request("POST", COMPLETIONS, content=b'{"prompt": "a", "max_tokens": 1}')
    request.headers.pop("content-type", None)
    assert tiny.client.send(request).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_case_26_another_model_is_not_found(tiny, path, stream):
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    error = tiny.refused(path, 404, **prompt, model="nope", stream=stream)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny" in error["message"]


def test_case_26_no_model_is_the_one_that_is_served(tiny):
    assert tiny.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).json()["model"] == "tiny"


def test_case_26_an_unknown_field_is_ignored_and_named(tiny):
    response = tiny.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "foo": 1, "bar": {"a": []}})
    assert response.status_code == 200
    assert response.headers["x-paceline-ignored-fields"] == "foo, bar"


def test_case_26_a_strict_server_refuses_it_by_name(folder):
    with stack(folder, router={"strict": True}) as running:
        error = running.refused(COMPLETIONS, prompt="a", foo=1)
        assert "foo" in error["message"]
        many = {f"f{number:04}" * 100: 1 for number in range(500)}
        running.refused(COMPLETIONS, prompt="a", **many)
        running.at_rest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("prompt_embeds", "x"),
        ("logits_processors", ["x"]),
        ("bad_words", ["x"]),
        ("kv_transfer_params", {}),
    ],
)
def test_case_26_a_known_field_that_does_nothing_here_is_refused_by_name(tiny, field, value):
    assert tiny.refused(COMPLETIONS, **{"prompt": "a", "n": 2, field: value})["param"] == field


@pytest.mark.parametrize(("field", "value"), [("tools", [{"type": "function"}]), ("chat_template", "x"), ("audio", {})])
def test_case_26_the_same_in_a_chat(tiny, field, value):
    assert tiny.refused(CHAT, **{"messages": [{"role": "user", "content": "a"}], field: value})["param"] == field
