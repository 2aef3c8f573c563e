import math

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.proto.errors import (
    InvalidRequest,
    ModelNotFound,
    NotPermitted,
    PacelineError,
    RequestError,
    UnsupportedField,
)
from paceline.proto.request import TokenLogprobs, Usage
from paceline.router import shapes
from paceline.router.config import RouterConfig
from paceline.router.detokenizer import TextDelta
from paceline.router.fields import BOTH, BY_ROUTE, CHAT, COMPLETIONS, FIELDS, IGNORED, SUPPORTED, UNSUPPORTED
from paceline.router.keys import Key
from paceline.router.messages import Message
from paceline.router.openai import parse
from paceline.router.tokenizer import Tokenizer
from tests.fakes import tiny_card

CARD = tiny_card()
V = CARD.vocab_size
CONFIG = RouterConfig()
STRICT = RouterConfig(strict=True)
TINY = Tokenizer(CARD)
HI = [{"role": "user", "content": "hi"}]


def complete(**body):
    return parse(COMPLETIONS, {"prompt": "hi"} | body, CARD, CONFIG)


def chat(**body):
    return parse(CHAT, {"messages": HI} | body, CARD, CONFIG)


def refused(call, **body) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(**body)
    return caught.value


def test_defaults_are_openais_and_a_seed_is_always_drawn():
    call = complete()
    params = call.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.n) == (1.0, 1.0, 0, 0.0, 1)
    assert (params.max_tokens, params.logprobs, call.stop, call.stream) == (None, None, (), False)
    assert complete().params.seed != complete().params.seed


def test_a_models_own_defaults_hold_until_the_request_says_otherwise():
    card = tiny_card(generation_defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_new_tokens": 7})
    params = parse(CHAT, {"messages": HI, "top_p": 1}, card, CONFIG).params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 1.0, 40, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True),
        ("n", 0), ("n", -1), ("n", 10**6), ("n", 1.0), ("temperature", 2.1), ("temperature", -0.1),
        ("temperature", "1"), ("temperature", True), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5),
        ("min_p", 1.1), ("presence_penalty", 2.5), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("seed", "x"), ("seed", 2**64), ("stop", ""), ("stop", [""]), ("stop", ["a", ""]), ("stop", 5),
        ("stop", [1]), ("stop", ["x"] * 17), ("stop", "x" * 1025), ("stop_token_ids", [999999]),
        ("stop_token_ids", [-1]), ("stop_token_ids", [V]), ("stop_token_ids", ["1"]), ("stop_token_ids", 3),
        ("ignore_eos", 1), ("stream", "yes"), ("stream_options", []), ("min_tokens", -1), ("min_tokens", 1.0),
        ("user", 5), ("priority", 1.5), ("priority", 2**31), ("model", 5), ("logit_bias", []),
        ("logit_bias", {"-1": 1}), ("logit_bias", {str(V): 1}), ("logit_bias", {"999999": 1}),
        ("logit_bias", {"AI": 1}), ("logit_bias", {"5.5": 1}), ("logit_bias", {"5": 100.5}),
        ("logit_bias", {"5": None}), ("logit_bias", {"5": True}), ("logit_bias", {"٣": 1}), ("logit_bias", {"05": 1}),
        ("logit_bias", {"": 1}), ("logit_bias", {str(id): 1 for id in range(1025)}), ("repetition_penalty", 1e-30),
        ("repetition_penalty", 1e30), ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("prompt_logprobs", True),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 1.5),
        ("truncate_prompt_tokens", True), ("cache_salt", 5), ("cache_salt", "x" * 1025), ("no_stop_trim", 1),
        ("include_stop_str_in_output", "yes"), ("skip_special_tokens", 0), ("return_token_ids", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", [complete, chat])
def test_a_wrong_type_or_range_names_the_field(call, field, value):
    extra = {"stream": True} if field == "stream_options" else {}
    error = refused(call, **extra | {field: value})
    assert (type(error), error.param) == (InvalidRequest, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None), ("prompt", []), ("prompt", 5), ("prompt", [[]]), ("prompt", [V]), ("prompt", [-1]),
        ("prompt", [1, "a"]), ("prompt", [1.0]), ("prompt", [True]), ("prompt", [[1], [V]]), ("prompt", {}),
        ("logprobs", True), ("logprobs", 21), ("logprobs", -1), ("echo", 1), ("add_special_tokens", 1),
    ],
)  # fmt: skip
def test_what_completions_refuse(field, value):
    assert refused(complete, **{field: value}).param == field


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"), ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"logprobs": 1}, "logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"prompt_logprobs": 0, "max_tokens": 0}, "max_tokens"),
        ({"continue_final_message": "x"}, "continue_final_message"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"), ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)  # fmt: skip
def test_what_chats_refuse(body, param):
    assert refused(chat, **body).param == param


# -- the three classes -------------------------------------------------------------------------------------------------

BASE = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": HI}}


def test_every_row_says_what_happens_and_stands_once_for_each_route():
    assert {field.status for field in FIELDS} == {SUPPORTED, UNSUPPORTED, IGNORED}
    for field in FIELDS:
        assert field.doc.endswith(".")
        assert (field.kind != "") == (field.status == SUPPORTED)
    assert sum(len(field.routes) for field in FIELDS) == sum(map(len, BY_ROUTE.values()))


@pytest.mark.parametrize("route", BOTH)
def test_known_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing(route):
    fields = [field for field in BY_ROUTE[route].values() if field.status == UNSUPPORTED]
    assert len(fields) > 20
    for field in fields:
        for neutral in (None, *field.neutral):
            assert parse(route, BASE[route] | {field.name: neutral}, CARD, STRICT).ignored == ()
        with pytest.raises(UnsupportedField) as caught:
            parse(route, BASE[route] | {field.name: {"something": "else"}}, CARD, CONFIG)
        assert caught.value.param == field.name


def test_neutral_means_the_same_type_too():
    assert refused(chat, echo=0).param == "echo"
    assert refused(complete, store=0).param == "store"


@pytest.mark.parametrize("route", BOTH)
def test_harmless_fields_are_ignored_and_named_as_unknown_ones_are(route):
    for field in BY_ROUTE[route].values():
        if field.status == IGNORED:
            assert parse(route, BASE[route] | {field.name: {"any": 1}}, CARD, CONFIG).ignored == (field.name,)
            assert parse(route, BASE[route] | {field.name: None}, CARD, CONFIG).ignored == ()


def test_unknown_fields_are_ignored_and_named_wherever_they_are():
    assert complete(foo=1, bar=None).ignored == ("foo", "bar")
    assert chat(messages=[{"role": "user", "content": "x", "mood": "fine"}]).ignored == ("messages.mood",)
    assert complete(stream=True, stream_options={"x": 1, "y": None}).ignored == ("stream_options.x",)
    assert complete(response_format={"type": "text", "x": 1}).ignored == ("response_format.x",)
    assert complete(structured_outputs={"disable_fallback": True}).ignored == ("structured_outputs.disable_fallback",)


def test_a_strict_server_names_ten_of_what_nothing_reads_and_repeats_nothing_harmful():
    body = {"prompt": "hi", "b,a\nd" + "x" * 100: 1, "metadata": {}} | {f"f{at}": 1 for at in range(20)}
    with pytest.raises(UnsupportedField) as caught:
        parse(COMPLETIONS, body, CARD, STRICT)
    message = caught.value.message
    assert "b?a?d" in message
    assert "metadata" in message
    assert "f7" in message
    assert "f8" not in message
    assert "12 more" in message
    assert len(message) < 300
    assert caught.value.param.startswith("b?a?d")
    assert parse(COMPLETIONS, {"prompt": "hi", "user": "x", "store": False}, CARD, STRICT).ignored == ()


@pytest.mark.parametrize("member", ["continuous_usage_stats", "include_obfuscation"])
def test_stream_options_that_are_not_served_are_refused_by_name(member):
    assert complete(stream=True, stream_options={member: False}).ignored == ()
    error = refused(complete, stream=True, stream_options={member: True})
    assert (type(error), error.param) == (UnsupportedField, f"stream_options.{member}")
    assert refused(complete, stream=True, stream_options={member: 1}).param == f"stream_options.{member}"
    assert refused(complete, stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


# -- what fields mean together -----------------------------------------------------------------------------------------


def test_best_of_may_only_be_n():
    assert complete(n=2, best_of=2).params.n == 2
    assert refused(complete, n=2, best_of=3).param == "best_of"


def test_another_models_name_is_not_answered_by_this_one():
    error = refused(chat, model="nope")
    assert type(error) is ModelNotFound
    assert "tiny" in error.message
    assert "nope" not in error.message


def test_accepted_values_arrive_as_the_engine_takes_them():
    call = complete(
        top_k=-1, seed=-1, stop=["a", "a", "b"], stop_token_ids=[V - 1], logit_bias={str(V - 1): 100}, logprobs=0,
        temperature=0, max_tokens=3, priority=-5, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    params = call.params
    assert (params.top_k, params.seed, params.stop_ids, params.logit_bias) == (0, 2**64 - 1, (V - 1,), {V - 1: 100.0})
    assert (call.stop, params.logprobs, call.priority, call.include_usage) == (("a", "b"), 0, -5, True)


@pytest.mark.parametrize(
    ("body", "want"),
    [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3), ({}, None), ({"logprobs": False}, None)],
)
def test_chat_logprobs(body, want):
    assert chat(**body).params.logprobs == want


@pytest.mark.parametrize(
    ("prompt", "want"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2]], ([1], [2]))]
)
def test_prompt_forms(prompt, want):
    assert complete(prompt=prompt).prompts == want


def test_message_parts_are_joined_in_order_and_empty_content_stays():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    raw = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
    ]
    assert chat(messages=raw).messages == (Message("developer", "ab"), Message("assistant", ""))


def test_least_and_most_tokens_must_agree():
    assert complete(min_tokens=3, max_tokens=3).params.min_tokens == 3
    assert complete(min_tokens=300).params.min_tokens == 300
    assert refused(complete, min_tokens=31, max_tokens=30).param == "min_tokens"
    assert refused(chat, min_tokens=31, max_completion_tokens=30).param == "min_tokens"


def test_nothing_is_generated_only_where_the_prompt_is_asked_about():
    assert complete(max_tokens=0, echo=True).params.max_tokens == 0
    assert complete(max_tokens=0, prompt_logprobs=2).params.prompt_logprobs == 2
    assert refused(complete, max_tokens=0).param == "max_tokens"
    assert refused(complete, max_tokens=0, echo=False).param == "max_tokens"
    assert refused(complete, max_tokens=0, echo=True, min_tokens=1).param == "min_tokens"


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({}, None), ({"echo": True}, None), ({"logprobs": 3}, None), ({"echo": True, "logprobs": 3}, 3),
        ({"prompt_logprobs": 2}, 2), ({"prompt_logprobs": 0, "logprobs": 5}, 0),
        ({"echo": True, "prompt_logprobs": 2}, 2),
        ({"echo": True, "logprobs": 0, "stream": True}, 0), ({"echo": True, "logprobs": 2, "prompt_logprobs": 2}, 2),
    ],
)  # fmt: skip
def test_an_echo_with_logprobs_wants_those_of_the_prompt(body, want):
    assert complete(**body).params.prompt_logprobs == want


def test_prompt_logprobs_are_not_streamed_and_do_not_contradict_an_echo():
    for call in (complete, chat):
        assert refused(call, prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    assert refused(complete, echo=True, logprobs=1, prompt_logprobs=2).param == "prompt_logprobs"


def test_two_names_of_one_field_may_not_differ():
    assert complete().include_stop is False
    assert complete(no_stop_trim=True).include_stop is True
    assert complete(no_stop_trim=True, include_stop_str_in_output=True).include_stop is True
    assert refused(complete, no_stop_trim=True, include_stop_str_in_output=False).param == "no_stop_trim"


def test_how_text_is_shown_and_prompts_are_read_arrives():
    call = complete(echo=True, skip_special_tokens=False, add_special_tokens=False, truncate_prompt_tokens=-1)
    assert (call.echo, call.skip_special, call.add_special_tokens, call.truncate) == (True, False, False, -1)
    plain = complete()
    assert (plain.echo, plain.skip_special, plain.add_special_tokens, plain.truncate) == (False, True, True, None)


TALK = [*HI, {"role": "assistant", "content": "The capital is"}]


@pytest.mark.parametrize(
    ("body", "opens", "continues"),
    [
        ({}, True, False), ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
        ({"continue_final_message": False, "add_generation_prompt": True}, True, False),
    ],
)  # fmt: skip
def test_the_template_opens_a_turn_or_the_last_message_goes_on(body, opens, continues):
    call = chat(messages=TALK, **body)
    assert (call.add_generation_prompt, call.continue_final) == (opens, continues)


def test_turns_that_cannot_be_are_refused():
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat, messages=TALK, **both).param == "continue_final_message"
    assert refused(chat, continue_final_message=True).param == "continue_final_message"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"])
def test_variables_of_the_template_may_not_replace_what_it_gets_anyway(name):
    assert chat(chat_template_kwargs={"enable_thinking": False}).template_kwargs == {"enable_thinking": False}
    error = refused(chat, chat_template_kwargs={name: "x"})
    assert error.param == "chat_template_kwargs"
    assert name in error.message


def test_variables_nested_without_end_are_refused():
    deep = []
    for _ in range(500):
        deep = [deep]
    assert refused(chat, chat_template_kwargs={"x": deep}).param == "chat_template_kwargs"


# -- what the key adds -------------------------------------------------------------------------------------------------


def keyed(key, **body):
    return parse(COMPLETIONS, {"prompt": "hi"} | body, CARD, CONFIG, key)


def test_the_tenant_is_the_keys_whatever_the_request_says():
    assert keyed(Key(tenant="a"), user="b").tenant == "a"
    assert complete(user="b").tenant == ""


@pytest.mark.parametrize(
    ("best", "asked", "want"),
    [(None, None, 0), (None, -9, -9), (2, None, 2), (-3, None, 0), (2, 2, 2), (2, 7, 7), (-3, -3, -3), (0, 0, 0)],
)
def test_a_key_bounds_the_priority_and_is_the_default_of_who_may_not_have_0(best, asked, want):
    assert keyed(Key(best_priority=best), priority=asked).priority == want


@pytest.mark.parametrize(("best", "asked"), [(0, -1), (2, 0), (-3, -4)])
def test_more_priority_than_the_key_has_is_403(best, asked):
    with pytest.raises(NotPermitted) as caught:
        keyed(Key(best_priority=best), priority=asked)
    assert caught.value.param == "priority"


def test_salts_of_key_and_request_are_told_apart():
    assert complete().salts == ()
    assert complete(cache_salt="").salts == ()
    assert keyed(Key(salt="a")).salts == ("a", "")
    assert complete(cache_salt="a").salts == ("", "a")
    assert keyed(Key(salt="a"), cache_salt="b").salts == ("a", "b")


# -- any value ---------------------------------------------------------------------------------------------------------


def test_choices_in_all_are_bounded():
    assert refused(complete, prompt=["a"] * 100, n=100).param == "n"
    assert refused(complete, prompt=["a"] * 3000).param == "prompt"


def outcome(call, body) -> PacelineError | None:
    try:
        call(**body)
    except PacelineError as error:
        return error
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(FIELDS), JSON)
@settings(max_examples=400)
def test_any_value_in_any_field_is_taken_or_refused_by_our_own_error(field, value):
    call = complete if COMPLETIONS in field.routes else chat
    error = outcome(call, {field.name: value})
    assert error is None or (error.http_status in (400, 404) and error.param and len(error.message) < 300)


# -- shapes ------------------------------------------------------------------------------------------------------------


def shape(call):
    return shapes.Shape(call, TINY, "id-1", 5)


def delta(text, reason=None, index=0, ids=(5,), logprobs=None):
    return TextDelta(index=index, text=text, ids=list(ids), logprobs=logprobs, finish_reason=reason)


def events(raw: bytes):
    return [orjson.loads(line[6:]) for line in raw.decode().split("\n\n") if line]


def test_chat_chunks_role_then_text_then_reason_then_usage():
    made = shape(chat(stream=True, n=2, stream_options={"include_usage": True}))
    opening = events(made.opening())
    assert [c["choices"][0]["delta"] for c in opening] == [{"role": "assistant", "content": ""}] * 2
    assert [c["choices"][0]["index"] for c in opening] == [0, 1]
    text, reason = events(made.event(delta('a"\n', "stop", index=1)))
    assert text["choices"] == [{"index": 1, "delta": {"content": 'a"\n'}, "logprobs": None, "finish_reason": None}]
    assert reason["choices"] == [{"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    [usage] = events(made.usage_event(Usage(7, 2, 3)))
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    everything = [*opening, text, reason, usage]
    assert {(c["id"], c["created"], c["object"], c["model"]) for c in everything} == {
        ("id-1", 5, "chat.completion.chunk", "tiny")
    }
    assert all(c["usage"] is None for c in everything[:-1])


def test_usage_is_not_mentioned_when_nobody_asked():
    [chunk] = events(shape(complete(stream=True)).event(delta("x")))
    assert "usage" not in chunk
    assert chunk["object"] == "text_completion"
    assert chunk["choices"] == [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}]


def lps(*values, tops=()):
    return [TokenLogprobs(value, [id for id, _ in tops], [v for _, v in tops]) for value in values]


def test_chat_logprobs_give_the_exact_bytes_and_sorted_tops():
    id = TINY.encode("한")[0]
    made = shape(chat(logprobs=True, top_logprobs=2))
    made.collect(delta("", "length", ids=[id], logprobs=lps(-0.5, tops=[(id, -0.5), (1, -2.0)])))
    [choice] = orjson.loads(made.whole(Usage(1, 0, 1)))["choices"]
    [entry] = choice["logprobs"]["content"]
    assert bytes(entry["bytes"]) == TINY.token_bytes(id)
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -2.0]
    assert entry["top_logprobs"][1]["token"] == "<|im_start|>"


def test_completion_logprobs_are_four_lists_of_one_length_with_offsets_into_the_text():
    ids = TINY.encode("a한b")
    made = shape(complete(logprobs=1))
    made.collect(delta("a한b", "stop", ids=ids, logprobs=lps(*[-0.5] * len(ids), tops=[(1, -0.1)])))
    [choice] = orjson.loads(made.whole(Usage(1, 0, len(ids))))["choices"]
    lists = choice["logprobs"]
    assert {len(values) for values in lists.values()} == {len(ids)}
    assert lists["text_offset"][0] == 0
    assert lists["text_offset"][-1] == 2
    assert lists["tokens"][1].startswith("bytes:\\x")
    assert set(lists["top_logprobs"][0]) == {"<|im_start|>", "a"}


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e9])
def test_no_infinity_reaches_json(value):
    made = shape(chat(logprobs=True))
    raw = made.event(delta("x", logprobs=lps(value)))
    [chunk] = events(raw)
    assert chunk["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_streamed_and_whole_logprobs_are_the_same_list():
    call = chat(logprobs=True)
    one, two = shape(call), shape(call)
    parts = [delta("a", ids=[5], logprobs=lps(-1.0)), delta("", "stop", ids=[2], logprobs=lps(-2.0))]
    streamed = [
        entry
        for part in parts
        for chunk in events(one.event(part))
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    for part in parts:
        two.collect(part)
    assert orjson.loads(two.whole(Usage(1, 0, 2)))["choices"][0]["logprobs"]["content"] == streamed
    assert len(streamed) == 2


def test_an_error_is_small_and_in_the_envelope():
    raw = shapes.error_of(InvalidRequest("x" * 100_000, "y" * 100_000))
    assert len(raw) < 16_384
    assert set(orjson.loads(raw)["error"]) == {"message", "type", "param", "code"}
