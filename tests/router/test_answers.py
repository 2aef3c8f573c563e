"""What clients read, over real HTTP: text and where it ends, prompts that are shown, log probabilities, pings."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.proto.errors import Overloaded
from paceline.proto.request import TokenLogprobs
from paceline.router.tokenizer import Tokenizer
from tests.fakes import FakeReplica, encode, prompt_logprobs_of, tiny_card
from tests.router.conftest import until

TOKENIZER = Tokenizer(tiny_card())
TEXT = "one two three four five six seven"
USER = [{"role": "user", "content": "hi"}]


def scripted(*ids: int, **options) -> FakeReplica:
    return FakeReplica(script=lambda request, choice: ids, **options)


def of_bytes(text: str) -> list[int]:
    """One id per byte."""
    by_byte = {TOKENIZER.token_bytes(id): id for id in range(TOKENIZER.vocab_size)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


@dataclass
class Streamed:
    """One choice of a stream, put together."""

    deltas: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def chunks_of(raw: str) -> list[dict[str, Any]]:
    *events, end = [event for event in raw.strip().split("\n\n") if not event.startswith(":")]
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def gathered(chunks: list[dict[str, Any]]) -> dict[int, Streamed]:
    told: dict[int, Streamed] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one = told.setdefault(choice["index"], Streamed())
        assert not one.reasons, "nothing follows the reason"
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if text:
            one.deltas.append(text)
        for name, values in (choice["logprobs"] or {}).items():
            one.logprobs.setdefault(name, []).extend(values)
        if choice["finish_reason"]:
            one.reasons.append(choice["finish_reason"])
    return told


def path_of(body) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def both(http, **body) -> tuple[dict[str, Any], dict[int, Streamed]]:
    """The whole answer, and the choices of the streamed one, which must be the same."""
    body = {"prompt": "hi"} | body if "messages" not in body else body
    whole = await http.post(path_of(body), json=body)
    assert whole.status_code == 200, whole.text
    streamed = await http.post(path_of(body), json=body | {"stream": True})
    told = gathered(chunks_of(streamed.text))
    for choice in whole.json()["choices"]:
        one = told[choice["index"]]
        assert one.text == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert one.reasons == [choice["finish_reason"]]
        assert one.logprobs == (choice["logprobs"] or {})
    return whole.json(), told


# -- where the text ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_frame", [1, 3, 50])
async def test_a_stop_string_over_tokens_is_never_shown(router, per_frame):
    stop = TEXT[5:12]
    async with FakeReplica(text=TEXT, per_frame=per_frame) as fake, router(fake.address) as http:
        whole, told = await both(http, stop=stop)
        assert whole["choices"][0]["text"] == TEXT[:5]
        assert told[0].reasons == ["stop"]
        whole, _ = await both(http, stop=stop, include_stop_str_in_output=True)
        assert whole["choices"][0]["text"] == TEXT[:12]


@pytest.mark.parametrize("stop", ["\n\n", ["\n\n"], ["zzz", "\n\n"]])
async def test_a_stop_string_may_begin_inside_a_token(router, stop):
    card = tiny_card()
    spec = json.loads(card.tokenizer_json)
    piece = ".ĊĊ"
    spec["model"]["vocab"][piece] = card.vocab_size
    card = tiny_card(tokenizer_json=json.dumps(spec), vocab_size=card.vocab_size + 1)
    ids = [*of_bytes("end"), card.vocab_size - 1, *of_bytes("Next"), 2]
    async with scripted(*ids, card=card) as fake, router(fake.address) as http:
        whole, _ = await both(http, stop=stop)
        assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("end.", "stop")
        assert whole["usage"]["completion_tokens"] == 4


async def test_no_stop_counts_before_min_tokens(router):
    ids = encode(TEXT)
    async with FakeReplica(text=TEXT) as fake, router(fake.address) as http:
        whole, told = await both(http, stop="one", min_tokens=20, max_tokens=30, logprobs=0, ignore_eos=True)
        assert whole["usage"]["completion_tokens"] >= 20
        assert told[0].deltas[0] == TOKENIZER.token_bytes(ids[0]).decode(), "nothing is held back"
        whole, _ = await both(http, stop=TEXT[3:9], min_tokens=len(ids) - 1, max_tokens=len(ids))
        assert whole["choices"][0]["text"] == TEXT
        refused = await http.post("/v1/completions", json={"prompt": "hi", "min_tokens": 31, "max_tokens": 30})
        assert refused.status_code == 400


async def test_the_text_of_a_stop_id_is_shown_only_if_asked_for_and_its_token_always_counts(router):
    ids = encode(TEXT)
    text = TOKENIZER.decode(ids[:6])
    async with FakeReplica(text=TEXT) as fake, router(fake.address) as http:
        body = {"stop_token_ids": [ids[5]], "min_tokens": 4, "return_token_ids": True, "logprobs": 0}
        whole, _ = await both(http, **body)
        (choice,) = whole["choices"]
        assert choice["text"] == TOKENIZER.decode(ids[:5])
        assert (choice["finish_reason"], choice["token_ids"]) == ("stop", ids[:6])
        assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"] == 6
        for name in ("include_stop_str_in_output", "no_stop_trim"):
            whole, _ = await both(http, **body, **{name: True})
            assert whole["choices"][0]["text"] == text


async def test_control_tokens_are_shown_only_if_asked_for(router):
    async with scripted(*encode("ab"), 1, *encode("c"), 2) as fake, router(fake.address) as http:
        assert (await both(http))[0]["choices"][0]["text"] == "abc"
        whole, _ = await both(http, skip_special_tokens=False)
        assert whole["choices"][0]["text"] == "ab<|im_start|>c"
        whole, _ = await both(http, skip_special_tokens=False, include_stop_str_in_output=True)
        assert whole["choices"][0]["text"] == "ab<|im_start|>c<|im_end|>"
        whole, _ = await both(http, skip_special_tokens=False, stop="_start")
        assert whole["choices"][0]["text"] == "ab<|im"


async def test_characters_that_tokens_cut_come_whole(router):
    async with scripted(*of_bytes("ď🙂é"), 2) as fake, router(fake.address) as http:
        whole, told = await both(http)
        assert told[0].deltas == ["ď", "🙂", "é"]
        whole, _ = await both(http, max_tokens=4)
        assert whole["choices"][0]["text"] == "ď"
        assert whole["usage"]["completion_tokens"] == 4


# -- choices -----------------------------------------------------------------------------------------------------------


async def test_each_of_several_choices_has_one_role_and_one_reason(router):
    async with FakeReplica(text=TEXT) as fake, router(fake.address) as http:
        body = {"messages": USER, "n": 3, "max_tokens": 8, "seed": 1, "stream": True}
        chunks = chunks_of((await http.post("/v1/chat/completions", json=body)).text)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
        assert {chunk["created"] for chunk in chunks} == {chunks[0]["created"]}
        assert not any("usage" in chunk for chunk in chunks)
        for index in range(3):
            own = [choice for choice in choices if choice["index"] == index]
            assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)
            assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
            assert own[-1]["delta"] == {}


async def test_no_choice_is_ever_lost_or_out_of_order(router):
    def script(request, choice):
        return [*encode("abcdefgh"[choice] * (choice % 3 + 1)), 2]  # the later ones often end first

    async with FakeReplica(script=script) as fake, router(fake.address) as http:
        room = asyncio.Semaphore(8)

        async def one() -> dict[str, Any]:
            async with room:
                return (await http.post("/v1/completions", json={"prompt": "hi", "n": 8})).json()

        for answer in await asyncio.gather(*(one() for _ in range(50))):
            choices = answer["choices"]
            assert [choice["index"] for choice in choices] == list(range(8))
            assert [choice["text"] for choice in choices] == ["abcdefgh"[at] * (at % 3 + 1) for at in range(8)]
            assert answer["usage"]["prompt_tokens"] == len(encode("hi"))
        body = {"prompt": ["A", "B", "C"], "n": 2, "max_tokens": 1}
        choices = (await http.post("/v1/completions", json=body)).json()["choices"]
        assert [(choice["index"], choice["text"]) for choice in choices] == [*enumerate("ababab")]


@pytest.mark.parametrize("options", [{"include_usage": True}, {}])
async def test_usage_comes_once_and_last_and_only_when_asked_for(router, options):
    async with FakeReplica(text=TEXT, num_cached=3) as fake, router(fake.address) as http:
        body = {"messages": USER, "max_tokens": 5}
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        more = {"stream": True, "stream_options": options}
        *chunks, last = chunks_of((await http.post("/v1/chat/completions", json=body | more)).text)
        if options:
            assert {chunk["usage"] for chunk in chunks} == {None}
            assert (last["choices"], last["usage"]) == ([], whole["usage"])
        else:
            assert not any("usage" in chunk for chunk in [*chunks, last])


# -- prompts -----------------------------------------------------------------------------------------------------------


async def test_an_echo_with_logprobs_and_no_tokens_is_the_prompt(router):
    prompt = "hello there, the end"
    num = len(encode(prompt))
    async with FakeReplica() as fake, router(fake.address) as http:
        whole, _ = await both(http, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        (choice,) = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        assert whole["usage"]["completion_tokens"] == 0
        lists = choice["logprobs"]
        assert lists["tokens"] == [TOKENIZER.token_bytes(id).decode() for id in encode(prompt)]
        assert lists["token_logprobs"] == [None, *(-place / 64 for place in range(1, num))]
        assert [tops and len(tops) for tops in lists["top_logprobs"]] == [None] + [1] * (num - 1)
        assert [prompt[at:].startswith(t) for at, t in zip(lists["text_offset"], lists["tokens"], strict=True)]
        assert lists["text_offset"] == sorted(set(lists["text_offset"]))
        whole, _ = await both(http, prompt=prompt, echo=True, logprobs=1, max_tokens=2)
        lists = whole["choices"][0]["logprobs"]
        assert len(lists["token_logprobs"]) == num + 2
        assert lists["text_offset"][num] == len(prompt)


async def test_every_choice_of_every_prompt_begins_with_its_own(router):
    prompts = ["hello there", "the end of it"]
    async with FakeReplica(text="Yes.") as fake, router(fake.address) as http:
        whole, told = await both(http, prompt=prompts, n=2, echo=True)
        assert [choice["text"] for choice in whole["choices"]] == [p + "Yes." for p in prompts for _ in range(2)]
        assert [told[at].deltas[0] for at in range(4)] == [p for p in prompts for _ in range(2)]
        whole, told = await both(http, prompt=[encode("ab"), [1, *encode("hello")]], n=2, echo=True, logprobs=2)
        assert [c["text"] for c in whole["choices"]] == ["abYes."] * 2 + ["<|im_start|>helloYes."] * 2
        lists = whole["choices"][3]["logprobs"]
        assert lists["tokens"][0] == "<|im_start|>"
        assert lists["text_offset"][:2] == [0, len("<|im_start|>")]


async def test_a_token_that_was_put_before_the_prompt_takes_no_room_in_it(router):
    async with FakeReplica(card=tiny_card(add_bos=True), text="Yes.") as fake, router(fake.address) as http:
        whole, _ = await both(http, prompt="hello", echo=True, logprobs=0, max_tokens=1)
        lists = whole["choices"][0]["logprobs"]
        assert whole["choices"][0]["text"].startswith("hello")
        assert lists["tokens"][:2] == ["<|endoftext|>", lists["tokens"][1]]
        assert lists["text_offset"][:2] == [0, 0]
        assert lists["text_offset"][-1] == len("hello")


async def test_logprobs_of_the_prompt_come_as_vllm_shows_them(router):
    prompt = encode("hello there")
    async with FakeReplica() as fake, router(fake.address) as http:
        body = {"prompt": prompt, "n": 2, "max_tokens": 1, "prompt_logprobs": 2}
        choices = (await http.post("/v1/completions", json=body)).json()["choices"]
        told = prompt_logprobs_of(fake.submissions[0])
        first, *entries = choices[0]["prompt_logprobs"]
        assert first is None
        assert len(entries) == len(prompt) - 1
        for id, entry, source in zip(prompt[1:], entries, told, strict=True):
            piece = TOKENIZER.token_bytes(id).decode()
            assert entry[str(id)] == {"logprob": source.logprob, "rank": 1, "decoded_token": piece}
            assert [value["rank"] for value in entry.values()] == [1, 2]
        assert choices[1]["prompt_logprobs"] == choices[0]["prompt_logprobs"]
        chat = await http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1, "prompt_logprobs": 0})
        (choice,) = chat.json()["choices"]
        assert "prompt_logprobs" not in choice
        entries = chat.json()["prompt_logprobs"]
        assert len(entries) == chat.json()["usage"]["prompt_tokens"]
        assert {value["rank"] for entry in entries[1:] for value in entry.values()} == {None}, "0 asks for no ranks"


async def test_a_prompt_whose_logprobs_are_not_all_told_is_no_answer(router):
    async with FakeReplica(short_prompt=True) as fake, router(fake.address) as http:
        for num in (0, 1):
            body = {"prompt": "hello there", "max_tokens": num, "prompt_logprobs": 0}
            answer = await http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "sequence_fault")


async def test_a_prompt_that_moves_tells_its_logprobs_from_the_beginning(router):
    prompt = "hello there, the end of the line"
    bad, good = FakeReplica(replica_id="a", fail_at=0, fail_code="replica_lost"), FakeReplica(replica_id="b")
    async with bad, good, router(bad.address, good.address) as http:
        await until(lambda: two_ready(http))
        for _ in range(4):  # whichever is asked first
            whole, _ = await both(http, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
            values = whole["choices"][0]["logprobs"]["token_logprobs"]
            assert values[: len(encode(prompt))] == [None, *(-at / 64 for at in range(1, len(encode(prompt))))]
        assert bad.submissions


async def two_ready(http) -> bool:
    return (await http.get("/health/ready")).json().get("replicas_ready") == 2


# -- log probabilities -------------------------------------------------------------------------------------------------


async def test_logprobs_of_a_chat_have_an_entry_for_every_token_that_counts(router):
    async with FakeReplica(text="Hi 🙂 you") as fake, router(fake.address) as http:
        for more, num_tops in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 3}, 3)):
            whole, _ = await both(http, messages=USER, logprobs=True, stop="you", **more)
            content = whole["choices"][0]["logprobs"]["content"]
            assert len(content) == whole["usage"]["completion_tokens"]
            assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "Hi 🙂 you"
            assert {len(entry["top_logprobs"]) for entry in content} == {num_tops}
            for entry in content:
                values = [top["logprob"] for top in entry["top_logprobs"]]
                assert values == sorted(values, reverse=True)
        for bad in ({"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 3}):
            refused = await http.post("/v1/chat/completions", json={"messages": USER} | bad)
            assert refused.status_code == 400


async def test_logprobs_of_a_completion_are_lists_as_long_as_it(router):
    async with FakeReplica(text=TEXT) as fake, router(fake.address) as http:
        whole, _ = await both(http, logprobs=0, max_tokens=5)
        lists = whole["choices"][0]["logprobs"]
        assert {len(values) for values in lists.values()} == {whole["usage"]["completion_tokens"]} == {5}
        assert (await http.post("/v1/completions", json={"prompt": "hi", "logprobs": True})).status_code == 400


async def test_a_control_token_has_its_logprob_and_what_cannot_be_has_the_lowest_number(router, monkeypatch):
    async with scripted(*encode("a"), 1, 2) as fake, router(fake.address) as http:
        told = [TokenLogprobs(float("-inf"), [0], [float("-inf")])]

        async def impossible(handle, running, choice, step=fake._next):
            delta = await step(handle, running, choice)
            return type(delta)(**{name: getattr(delta, name) for name in delta.__struct_fields__} | {"logprobs": told})

        monkeypatch.setattr(fake, "_next", impossible)
        whole, _ = await both(http, messages=USER, logprobs=True, top_logprobs=1)
        content = whole["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["a", "<|im_start|>", "<|im_end|>"]
        assert {entry["logprob"] for entry in content} == {-9999.0}
        assert {top["logprob"] for entry in content for top in entry["top_logprobs"]} == {-9999.0}


# -- silence and errors ------------------------------------------------------------------------------------------------


async def test_a_stream_without_a_token_yet_is_kept_alive_by_comments(router):
    async with FakeReplica(text="Yes.", hold=True) as fake, router(fake.address, ping_seconds=0.01) as http:
        body = {"messages": USER, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
            fake.release()
            rest = "\n".join([line async for line in lines])
        first, *_ = chunks_of(rest)
        assert first["choices"][0]["delta"]["role"] == "assistant"
        events = rest.split("\n\n")
        at = next(at for at, event in enumerate(events) if event.startswith("data:"))
        assert not any(event.startswith(":") for event in events[at:]), "none after the first token"
        assert gathered(chunks_of(rest))[0].text == "Yes."


async def test_what_fails_before_the_first_ping_is_a_status_and_after_it_an_event(router):
    full = Overloaded("the queue is full", retry_after=1)
    body = {"prompt": "hi", "stream": True}
    async with FakeReplica(reject=full) as fake, router(fake.address, ping_seconds=5) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 429
    async with FakeReplica(reject=full, hold=True) as fake, router(fake.address, ping_seconds=0.01) as http:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (response.status_code, await anext(lines)) == (200, ": ping")
            fake.release()
            *pings, last = [line async for line in lines if line]
        assert set(pings) <= {": ping"}
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == full.code


@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_pings_when_it_is_switched_off_or_the_answer_is_whole(router, stream):
    seconds = 0 if stream else 0.01
    async with FakeReplica(hold=True, text="Yes.") as fake, router(fake.address, ping_seconds=seconds) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi", "stream": stream}))
        await until(lambda: fake.submissions)
        await asyncio.sleep(0.05)
        fake.release()
        assert ": ping" not in (await asked).text


async def test_a_stream_that_breaks_says_so_once_and_is_not_done(router):
    async with FakeReplica(text=TEXT, fail_at=3, delay=0.001) as fake, router(fake.address) as http:
        raw = (await http.post("/v1/chat/completions", json={"messages": USER, "stream": True})).text
        *chunks, last = [json.loads(event.removeprefix("data: ")) for event in raw.strip().split("\n\n")]
        assert set(last) == {"error"}
        assert not any("error" in chunk for chunk in chunks)
        assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
        assert (await http.get("/health/ready")).status_code == 200
