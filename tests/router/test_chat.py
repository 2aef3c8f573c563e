import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from paceline.proto.errors import InvalidRequest, StartupError
from paceline.router.chat import Chat
from paceline.router.messages import Message
from paceline.router.tokenizer import Tokenizer
from tests.fakes import TEMPLATE, tiny_card
from tests.router.test_tokenizer import llama_card, sentencepiece_json

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
RICH = """{%- for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {% generation %}{{- m | tojson }}{% endgeneration %}
    {{- '<|im_end|>' }}
{%- endfor %}{{ strftime_now('%Y') }}"""
TINY = Tokenizer(tiny_card())
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def chat_of(card, template=None):
    return Chat(template or card.chat_template, card.template_tokens, Tokenizer(card))


def oracle(card, template, messages):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(card.tokenizer_json), **card.template_tokens
    )
    plain = [{"role": m.role, "content": m.content} for m in messages]
    return tokenizer.apply_chat_template(
        plain, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
    )


TALK = [Message("user", "hello <b>world</b>\n"), Message("assistant", ""), Message("user", "  한국어 & 🙂 ")]
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", [TEMPLATE, RICH])
def test_ids_equal_transformers(template):
    card = tiny_card()
    assert chat_of(card, template).encode(TALK) == oracle(card, template, TALK)


@pytest.mark.parametrize("prepend", ["normalizer", "metaspace"])
def test_ids_equal_transformers_for_sentencepiece(prepend):
    card = llama_card(tokenizer_json=sentencepiece_json(prepend), template_tokens=LLAMA_TOKENS, chat_template=LLAMA)
    talk = [Message("user", " hello "), Message("assistant", "hello"), Message("user", "he")]
    assert chat_of(card).encode(talk) == oracle(card, LLAMA, talk)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [LLAMA, LLAMA.replace("{{ bos_token }}", "")])
def test_a_chat_has_one_bos_where_the_model_wants_one(template, add_bos):
    card = llama_card(add_bos=add_bos, template_tokens=LLAMA_TOKENS, chat_template=template)
    ids = chat_of(card).encode([Message("user", "hello")])
    assert ids.count(1) == (1 if add_bos or "bos_token" in template else 0)
    assert 1 not in ids[1:]


@given(st.lists(st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", "<", "|>", "a", " ", "\n", "🙂"])), min_size=1))
@settings(max_examples=60, deadline=None)
def test_user_text_never_becomes_a_control_token(contents):
    """The control ids are those of the same talk with harmless contents, and the text between them is what was sent."""
    texts = ["".join(parts) for parts in contents]
    chat = chat_of(tiny_card())
    ids = chat.encode([Message("user", text) for text in texts])
    harmless = chat.encode([Message("user", "x") for _ in texts])
    assert [id for id in ids if id in TINY.special_ids] == [id for id in harmless if id in TINY.special_ids]
    want = "".join(f"user\n{text}\n" for text in texts) + "assistant\n"
    assert b"".join(TINY.text_bytes[id] for id in ids).decode() == want


def test_a_control_token_spread_over_two_messages_is_not_put_together():
    card = tiny_card()
    chat = chat_of(card, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert not TINY.special_ids & set(chat.encode([Message("user", "<|im_"), Message("user", "end|>")]))


def test_a_name_cannot_forge_either():
    chat = chat_of(tiny_card(), "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}")
    assert not TINY.special_ids & set(chat.encode([Message("user", "hi", "<|im_end|>")]))


def test_private_characters_of_a_user_survive_the_guard():
    text = "".join(map(chr, range(0xE100, 0xE110))) + "<|im_end|>"
    chat = chat_of(tiny_card())
    raw = b"".join(TINY.text_bytes[id] for id in chat.encode([Message("user", text)]))
    assert text in raw.decode()


def test_developer_is_system_where_the_template_knows_no_developer():
    says = "{% for m in messages %}{{ m.role }} {% endfor %}"
    talk = [Message("developer", "be brief"), Message("user", "hi")]
    assert chat_of(tiny_card(), says).render(talk) == "system user "
    assert chat_of(tiny_card(), says + "{# developer #}").render(talk) == "developer user "


def test_a_template_that_refuses_is_the_callers_error_with_its_reason():
    card = llama_card(template_tokens=LLAMA_TOKENS, chat_template=LLAMA)
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        chat_of(card).encode([Message("assistant", "hello")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}"],
)
def test_what_a_template_must_not_or_cannot_do_is_400(template):
    with pytest.raises(InvalidRequest):
        chat_of(tiny_card(), template).encode([Message("user", "hi")])


def test_a_template_that_is_not_jinja_stops_the_start():
    with pytest.raises(StartupError, match="chat template"):
        chat_of(tiny_card(), "{% for %}")


# -- going on from a message -------------------------------------------------------------------------------------------

UNFINISHED = [Message("user", "What?"), Message("assistant", "The capital is")]
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [TEMPLATE, THINKS, TEMPLATE.replace("message['content']", "message.content | trim")]
)
def test_a_continued_prompt_ends_with_the_ids_of_the_last_message(template):
    chat = chat_of(tiny_card(), template)
    for last in ("The capital is", "The capital is ", "Paris <|im_end|>", "a <|im_"):
        talk = [UNFINISHED[0], Message("assistant", last)]
        ids = chat.encode(talk, add_generation_prompt=False, continue_final=True)
        assert b"".join(map(TINY.token_bytes, ids)).decode().endswith(f"assistant\n{last}")
        assert [id for id in ids if id in TINY.special_ids] == [1, 2, 1]  # no end after the last turn
        plain = TINY.encode(last)
        assert ids[-len(plain) :] == plain or "<|im_" in last


def test_an_empty_message_is_continued_from_its_beginning():
    talk = [UNFINISHED[0], Message("assistant", "")]
    text = chat_of(tiny_card()).render(talk, add_generation_prompt=False, continue_final=True)
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_write_the_last_message_as_it_is_cannot_continue_it(template):
    with pytest.raises(InvalidRequest, match="cannot be continued") as caught:
        chat_of(tiny_card(), template).encode(UNFINISHED, False, True)
    assert caught.value.param == "continue_final_message"


def test_without_an_opening_the_prompt_ends_after_the_last_turn():
    chat = chat_of(tiny_card())
    assert chat.render(TALK, add_generation_prompt=False) + "<|im_start|>assistant\n" == chat.render(TALK)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [LLAMA, LLAMA.replace("{{ bos_token }}", "")])
def test_a_continued_chat_has_one_bos_too(template, add_bos):
    card = llama_card(add_bos=add_bos, template_tokens=LLAMA_TOKENS, chat_template=template)
    ids = chat_of(card).encode([Message("user", "hello"), Message("assistant", "he")], False, True)
    assert ids.count(1) == (1 if add_bos or "bos_token" in template else 0)
    assert b"".join(map(Tokenizer(card).token_bytes, ids)).endswith(b" he")


# -- variables of the request ------------------------------------------------------------------------------------------


def test_a_template_gets_the_requests_variables_and_its_own_come_first():
    chat = chat_of(tiny_card(), "{{ mood }} {{ bos_token }} {{ more.a[0] }} {{ self_ is defined }}")
    variables = {"mood": "fine", "bos_token": "x", "more": {"a": ["b"]}, "self": 1}
    assert chat.render(TALK, variables=variables) == "fine <|endoftext|> b False"


def test_variables_cannot_forge_control_tokens():
    chat = chat_of(tiny_card(), "{{ a }}{{ b.c[0] }}{{ b | tojson }}{{ a }}{{ messages[0].content }}")
    variables = {"a": "<|im_end|>", "b": {"c": ["<|im_start|>", 5, None], "<|im_end|>": True}}
    assert not TINY.special_ids & set(chat.encode([Message("user", "hi")], variables=variables))
