"""The card says what a model is; its fingerprint changes with anything that could change an answer."""

import json
from pathlib import Path

import pytest

from paceline.proto.errors import StartupError
from paceline.proto.model import KVGroup, ModelCard
from paceline.worker.card import make_card
from paceline.worker.checkpoint import open_checkpoint
from tests.models import CHAT_TEMPLATE, edit_json, tiny_llama_folder, write_gguf


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny_llama_folder(tmp_path / "llama")


def card_of(path: Path, **changes) -> ModelCard:
    settings = {"name": "tiny", "dtype": "float32", "max_model_len": 200, "block_size": 16} | changes
    return make_card(open_checkpoint(path), **settings)


def test_a_card_holds_what_router_and_engine_need(folder):
    card = card_of(folder)
    assert (card.name, card.architecture, card.max_model_len, card.vocab_size) == ("tiny", "llama", 200, 384)
    assert card.kv_groups == (KVGroup(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32"),)
    assert card.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (card.eos_ids, card.bos_id, card.add_bos) == ((2, 0), 1, False)
    assert card.chat_template == CHAT_TEMPLATE
    assert card.template_tokens["eos_token"] == "<|im_end|>"
    assert json.loads(card.tokenizer_json)["model"]["type"] == "BPE"


def test_a_hybrid_has_a_group_for_each_table_and_blocks_as_large_as_the_largest_needs(tmp_path):
    folder = tiny_llama_folder(tmp_path / "hybrid", num_hidden_layers=5)
    edit_json(
        folder / "config.json",
        architectures=["Qwen2ForCausalLM"],
        layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
        use_sliding_window=True,
        sliding_window=32,
    )
    card = card_of(folder)
    assert [(group.window, group.num_layers) for group in card.kv_groups] == [(0, 1)] * 2 + [(32, 1)] * 3
    assert card.windows == (0, 0, 32, 32, 32)
    one = 2 * 2 * 16 * 4  # keys and values of one layer
    assert card.kv_bytes_per_token == 5 * one
    edit_json(folder / "config.json", layer_types=["sliding_attention"] * 5)
    card = card_of(folder)
    assert [(group.window, group.num_layers) for group in card.kv_groups] == [(32, 5)]
    assert card.kv_bytes_per_token == 5 * one


def test_padded_rows_of_the_embedding_are_not_ids(tmp_path):
    assert card_of(tiny_llama_folder(tmp_path / "padded", vocab_size=448)).vocab_size == 384
    assert card_of(tiny_llama_folder(tmp_path / "short", vocab_size=300)).vocab_size == 300


def test_gguf_and_folder_make_the_same_card_but_for_the_fingerprint(folder, tmp_path):
    one, two = card_of(folder), card_of(write_gguf(folder, tmp_path / "m.gguf"))
    same = ("architecture", "vocab_size", "kv_groups", "bos_id", "add_bos", "chat_template", "max_model_len")
    assert all(getattr(one, field) == getattr(two, field) for field in same)
    assert one.fingerprint != two.fingerprint


def test_equal_models_have_equal_fingerprints_whatever_their_name_and_place(folder, tmp_path):
    copy = tiny_llama_folder(tmp_path / "again")
    assert card_of(copy, name="other").fingerprint == card_of(folder).fingerprint
    assert len(card_of(folder).fingerprint) == 64


def test_weights_dtype_tokenizer_and_template_are_in_the_fingerprint(folder, tmp_path):
    fingerprints = {card_of(folder).fingerprint, card_of(folder, dtype="bfloat16").fingerprint}
    fingerprints.add(card_of(tiny_llama_folder(tmp_path / "seed", seed=1)).fingerprint)
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    fingerprints.add(card_of(folder).fingerprint)
    edit_json(folder / "tokenizer.json", normalizer={"type": "NFC"})
    fingerprints.add(card_of(folder).fingerprint)
    assert len(fingerprints) == 5


def test_a_tokenizer_that_cannot_be_built_is_one_sentence(folder, tmp_path):
    path = write_gguf(folder, tmp_path / "m.gguf", extra={"tokenizer.ggml.merges": ["no such", "tokens here"]})
    with pytest.raises(StartupError, match=r"tokenizer of .* cannot be built"):
        card_of(path)
