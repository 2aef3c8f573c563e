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
