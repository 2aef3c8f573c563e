"""Every family against transformers: the same logits in fp32, however the prompt is cut, past the window, and on two
ranks. Two logits are the same where they differ by no more than 1e-4, or 1e-5 of the largest if that is more."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.models import architectures
from tests.models import edit_json
from tests.worker.crew import gang_config
from tests.worker.drive import Driver, Row, rank_of
from tests.worker.families import FAMILIES, WINDOW
from tests.worker.oracle import IDS, NUM_PROMPT, check, maker
from tests.worker.test_models_llama import Recorder, close


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return maker(FAMILIES, lambda: tmp_path_factory.mktemp("family"))


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_chunks_and_decodes_give_the_oracles_logits(made, name):
    rank = rank_of(made(name).folder, num_threads=1)
    recorder, driver = Recorder(rank), Driver(rank)
    for chunk in (None, 7):
        check(driver, recorder.take, made(name).logits, chunk)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["TP 2", "PP 2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_give_the_oracles_logits(made, crew, name, tp, pp):
    gang = crew.gang(gang_config(made(name).folder, tp, pp))
    check(Driver(gang), gang.take, made(name).logits, 7)


@pytest.mark.parametrize("name", ["olmo2", "phi3"])
def test_ranks_that_hold_the_same_kv_head_count_it_once(made, crew, name):
    gang = crew.gang(gang_config(made(name).folder, 3, 1))
    check(Driver(gang), gang.take, made(name).logits, 7)


def test_every_architecture_has_a_row():
    assert {tiny.architecture for tiny in FAMILIES.values()} >= architectures().keys()


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_rows_of_all_lengths_stand_in_one_step(made, name):
    """Some within the window, some far past it, beside a prompt's chunk."""
    rank = rank_of(made(name).folder, num_threads=1)
    recorder, driver = Recorder(rank), Driver(rank)
    lengths = (1, 16, 17, WINDOW, 36, 37, 64)
    alone = []
    for length in lengths:
        slot = driver.admit(0, IDS)
        driver.prefill(slot, length)
        driver.release(slot)
        alone.append(recorder.take())
    for slot, length in enumerate(lengths):
        driver.admit(slot, IDS)
        if length > 1:
            driver.prefill(slot, length - 1, 9)
    driver.admit(len(lengths), IDS)
    recorder.take()
    last = [Row(slot, length - 1, 1, token=IDS[length - 1]) for slot, length in enumerate(lengths)]
    driver.step(*last, Row(len(lengths), 0, 64))
    together = recorder.take()  # in the batch's order: by length, and the chunk last
    assert close(together, torch.cat((*alone, alone[-1])))


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "olmo2", "gpt2", "granite"])
def test_bf16_is_close_to_fp32(made, name):
    logits = []
    for dtype in ("float32", "bfloat16"):
        rank = rank_of(made(name).folder, dtype=dtype, num_threads=1)
        recorder, driver = Recorder(rank), Driver(rank)
        slot = driver.admit(0, IDS)
        driver.prefill(slot, NUM_PROMPT, 16)
        for position in range(NUM_PROMPT, NUM_PROMPT + 5):
            driver.step(Row(slot, position, 1, token=IDS[position]))  # what each would choose is a near tie
        logits.append(recorder.take().float())
    fp32, bf16 = logits
    assert (fp32 - bf16).abs().mean() < 0.1 * fp32.std()


def test_long_rope_is_short_where_no_sequence_can_be_long(tmp_path):
    """Which of its two rows of factors is meant depends on what may be served, not on where a sequence stands."""
    model = FAMILIES["phi3, longrope"].make(tmp_path / "model")
    with torch.no_grad():
        theirs = model(torch.tensor([IDS[:30]])).logits[0, -1:]
    rank = rank_of(tmp_path / "model", max_model_len=32, num_threads=1)
    recorder, driver = Recorder(rank), Driver(rank)
    driver.prefill(driver.admit(0, IDS[:30]), 30)
    assert close(recorder.take(), theirs)


# Fields of config.json


@pytest.fixture
def spec_of(made, tmp_path):
    """The spec of a family's folder after changes to its config, a value of None taking a field away."""

    def read(name: str, **changes):
        folder = tmp_path / "model"
        shutil.copytree(made(name).folder, folder, dirs_exist_ok=True)
        edit_json(folder / "config.json", **changes)
        return open_checkpoint(folder).spec

    return read


def test_a_mistral_without_the_field_has_a_window_and_with_null_none(spec_of, made, tmp_path):
    assert spec_of("mistral").windows == (WINDOW,) * 3
    assert spec_of("mistral", sliding_window=None, max_position_embeddings=32768).windows == (4096,) * 3
    assert spec_of("mistral, no window").windows == ()
    assert json.loads((made("mistral, no window").folder / "config.json").read_text())["sliding_window"] is None


def test_a_window_that_no_sequence_outgrows_is_none(spec_of):
    assert spec_of("mistral", sliding_window=256).windows == ()


def test_windows_follow_layer_types_or_else_the_familys_pattern(spec_of):
    assert spec_of("gemma3").windows == (WINDOW, WINDOW, 0, WINDOW, 0)
    assert spec_of("gemma3", layer_types=None, sliding_window_pattern=2).windows == (WINDOW, 0, WINDOW, 0, WINDOW)
    assert spec_of("gemma2", layer_types=None).windows == (WINDOW, 0, WINDOW)
    assert spec_of("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2).windows == ()
    windowed = spec_of("qwen2", layer_types=None, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    assert windowed.windows == (0, 0, WINDOW)


def test_gemma3_reads_alike_in_both_spellings(spec_of):
    new = spec_of("gemma3")
    assert (new.rope_theta, new.local_rope_theta) == (1e6, 1e4)
    old = spec_of("gemma3", rope_parameters=None, rope_scaling={"rope_type": "linear", "factor": 4.0}, rope_theta=1e6)
    assert old == new


def test_a_multimodal_gemma_leaves_out_what_all_sizes_share(spec_of, made):
    config = json.loads((made("gemma3, multimodal").folder / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window", "model_type")
    text = {field: config["text_config"][field] for field in kept}
    spec = spec_of("gemma3, multimodal", text_config=text)
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262208, 8, 4, 256)
    assert (spec.max_position, spec.rope_theta, spec.local_rope_theta) == (131072, 1e6, 1e4)
    assert (spec.attention_scale, spec.attention_softcap, spec.logit_softcap) == (256**-0.5, 0.0, 0.0)


def test_exaone_reads_alike_as_published_and_as_transformers_writes_it(spec_of):
    theirs = {"num_layers": None, "layer_norm_epsilon": None, "activation_function": None}
    ours = {"num_hidden_layers": 3, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    assert spec_of("exaone", **theirs, **ours) == spec_of("exaone")


def test_a_windowed_layer_of_olmo3_is_never_stretched(spec_of):
    new = spec_of("olmo3")
    assert (new.rope_scaling.kind, new.local_rope_theta) == ("yarn", 500000.0)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert spec_of("olmo3", rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling) == new


def test_what_is_rotated_does_not_hang_on_how_long_a_sequence_may_be(spec_of):
    for name in ("exaone4", "cohere2"):
        spec = spec_of(name, max_position_embeddings=WINDOW)
        assert (spec.unrotated_layers, spec.windows) == ((3,), (WINDOW, WINDOW, WINDOW, 0))


def test_gpt2_serves_no_sequence_that_is_longer_than_its_positions(made):
    with pytest.raises(StartupError, match="--max-model-len 300 is more than the 256 positions"):
        rank_of(made("gpt2").folder, max_model_len=300, num_threads=1)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma2", {"hidden_activation": "mish"}, "hidden_activation 'mish', which is not supported; supported: silu"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3", {"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar 'x', which is no number"),
        ("phi3", {"attention_bias": True}, "attention_bias True"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3, "use_sliding_window": True}, "chunked_attention"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern 'LLLG'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers [1, 0], which is not supported; supported: a list of"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(spec_of, name, changes, says):
    with pytest.raises(StartupError) as error:
        spec_of(name, **({"sliding_window": WINDOW} | changes))
    message = str(error.value)
    assert says in message
    assert "config.json" in message
    assert message.endswith(".")


def test_a_fused_tensor_of_the_wrong_size_is_refused(made, tmp_path):
    folder = Path(shutil.copytree(made("phi3").folder, tmp_path / "model"))
    edit_json(folder / "config.json", num_key_value_heads=1)
    with pytest.raises(StartupError, match="do not fit its config"):
        rank_of(folder)
