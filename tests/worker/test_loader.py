"""A model is filled whole or refused in one sentence that names the tensors."""

import pytest
import torch

from paceline.proto.errors import StartupError
from paceline.worker.layers.linear import Linear
from paceline.worker.loader import load_weights, weight_bytes
from paceline.worker.models import model_class
from paceline.worker.models.llama import Llama
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups, Place

CPU = torch.device("cpu")


def spec_of(**fields) -> ModelSpec:
    defaults = {
        "architecture": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position": 128,
        "norm_eps": 1e-5,
    }
    return ModelSpec(**(defaults | fields))


class Files:
    """Stands in for a checkpoint: tensors in memory, and which were read."""

    def __init__(self, spec: ModelSpec):
        torch.manual_seed(0)
        self.spec, self.read, self.num_read = spec, [], 0
        hidden, wide, kv = spec.hidden_size, spec.intermediate_size, spec.num_kv_heads * spec.head_dim
        self.tensors = {"model.embed_tokens.weight": torch.randn(spec.vocab_size, hidden)}
        for i in range(spec.num_layers):
            at = f"model.layers.{i}."
            shapes = {
                "self_attn.q_proj": (spec.num_heads * spec.head_dim, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, spec.num_heads * spec.head_dim),
                "mlp.gate_proj": (wide, hidden),
                "mlp.up_proj": (wide, hidden),
                "mlp.down_proj": (hidden, wide),
            }
            for name, shape in shapes.items():
                self.tensors[f"{at}{name}.weight"] = torch.randn(shape)
                if spec.attention_bias and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                    self.tensors[f"{at}{name}.bias"] = torch.randn(shape[0])
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.tensors[f"{at}{name}.weight"] = torch.randn(hidden)
        self.tensors["model.norm.weight"] = torch.randn(hidden)
        if not spec.tie_embeddings:
            self.tensors["lm_head.weight"] = torch.randn(spec.vocab_size, hidden)

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def get(self, name, rows=None, columns=None):
        self.read.append(name)
        tensor = self.tensors[name][rows or slice(None)]
        tensor = (tensor if columns is None else tensor[:, columns]).clone()
        self.num_read += tensor.numel()
        return tensor


def load(files: Files, dtype=torch.float32, place: Place | None = None) -> Llama:
    model = Llama(files.spec, dtype, Groups(place))
    load_weights(model, files, CPU)
    return model


def plain(linear: Linear) -> torch.Tensor:
    """The weight as [out, in], whether or not it was packed."""
    return linear.weight if linear.packed is None else linear.packed.plain()


def test_parts_stand_in_their_rows_of_the_fused_weight():
    files = Files(spec_of(attention_bias=True))
    model = load(files)
    parts = [f"model.layers.1.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
    fused = model.model.layers["1"].self_attn.qkv_proj
    assert torch.equal(plain(fused), torch.cat([files.tensors[f"{part}.weight"] for part in parts]))
    assert torch.equal(fused.bias, torch.cat([files.tensors[f"{part}.bias"] for part in parts]))
    gate_up = plain(model.model.layers["0"].mlp.gate_up_proj)
    assert torch.equal(gate_up[48:], files.tensors["model.layers.0.mlp.up_proj.weight"])


def test_every_tensor_is_read_once_and_nothing_is_left_on_the_meta_device():
    files = Files(spec_of())
    model = load(files)
    assert sorted(files.read) == sorted(files.tensors)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_model_takes_no_memory_before_it_is_loaded():
    assert all(parameter.is_meta for parameter in Llama(spec_of(), torch.float32).parameters())


def test_order_of_the_names_does_not_matter():
    files, turned = Files(spec_of()), Files(spec_of())
    turned.tensors = dict(reversed(turned.tensors.items()))
    one, other = (dict(load(each).named_modules()) for each in (files, turned))
    for name in ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "lm_head"):
        assert torch.equal(plain(one[name]), plain(other[name]))


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_count_parameters_and_the_packed_copy_of_the_head(tied):
    """Norms stay fp32; the head keeps its rows plain beside the packed copy."""
    files = Files(spec_of(tie_embeddings=tied))
    found = load_weights(Llama(files.spec, torch.bfloat16), files, CPU)
    norms = sum(t.numel() for name, t in files.tensors.items() if "norm" in name)
    head = files.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].numel()
    assert found == 2 * (sum(t.numel() for t in files.tensors.values()) + head + norms)


def places(tp: int, pp: int) -> list[Place]:
    return [Place.of(rank, tp, pp) for rank in range(tp * pp)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_share_are_known_before_it_is_read(tied, dtype):
    files = Files(spec_of(tie_embeddings=tied, attention_bias=True))
    for place in (Place(), *places(2, 2), *places(3, 1)):
        model = Llama(files.spec, dtype, Groups(place))
        expected = weight_bytes(model, CPU)
        assert files.read == []
        assert load_weights(model, files, CPU) == expected
        files.read.clear()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_ranks_read_each_value_once_but_for_what_they_must_all_have(tp, pp, tied):
    spec = spec_of(tie_embeddings=tied, num_layers=3)
    values = {name: tensor.numel() for name, tensor in Files(spec).tensors.items()}
    norms = sum(count for name, count in values.items() if "norm" in name)
    kv = sum(count for name, count in values.items() if "k_proj" in name or "v_proj" in name)
    expected = sum(values.values()) + (tp - 1) * norms + (max(tp, 2) // 2 - 1) * kv
    if tied and pp > 1:  # the last stage has the embedding's rows for its head
        expected += values["model.embed_tokens.weight"]
    ranks = [Files(spec) for _ in range(tp * pp)]
    for files, place in zip(ranks, places(tp, pp), strict=True):
        load(files, place=place)
        assert len(files.read) == len(set(files.read))
        assert files.num_read < 1.5 * sum(values.values()) / (tp * pp) + norms + values["model.embed_tokens.weight"]
    assert sum(files.num_read for files in ranks) == expected


def test_a_rank_has_the_rows_and_columns_of_its_heads():
    files = Files(spec_of(num_heads=9, num_kv_heads=3, attention_bias=True))
    second = load(files, place=Place.of(1, 2, 1)).model.layers["0"].self_attn
    at = "model.layers.0.self_attn."
    rows = {"q_proj": slice(48, 72), "k_proj": slice(16, 24), "v_proj": slice(16, 24)}
    for parameter, found in (("weight", plain(second.qkv_proj)), ("bias", second.qkv_proj.bias)):
        expected = [files.tensors[f"{at}{name}.{parameter}"][part] for name, part in rows.items()]
        assert torch.equal(found, torch.cat(expected))
    assert torch.equal(plain(second.o_proj), files.tensors[f"{at}o_proj.weight"][:, 48:])


def test_a_flaw_in_another_ranks_share_is_refused_before_anything_is_read():
    files = Files(spec_of())
    del files.tensors["model.layers.1.mlp.up_proj.weight"]
    files.tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 47)
    for place in places(2, 2):
        with pytest.raises(StartupError, match=r"lack tensor model\.layers\.1\.mlp\.up_proj"):
            load(files, place=place)
    files.tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32)
    with pytest.raises(StartupError, match=r"down_proj\.weight is \[32, 47\] and should be \[32, 48\]"):
        load(files, place=Place.of(0, 1, 2))
    assert files.read == []


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        (("model.norm.weight",), r"lack tensor model\.norm\.weight\."),
        (("model.layers.0.mlp.up_proj.weight", "lm_head.weight"), r"lack tensors lm_head\.weight, model\.layers\.0"),
    ],
)
def test_missing_tensors_are_named(gone, told):
    files = Files(spec_of())
    for name in gone:
        del files.tensors[name]
    with pytest.raises(StartupError, match=told):
        load(files)
    assert files.read == []


def test_at_most_three_tensors_are_named():
    files = Files(spec_of())
    for i in range(5):
        files.tensors[f"extra.{i}"] = torch.zeros(1)
    with pytest.raises(StartupError, match=r"hold tensors extra\.0, extra\.1, extra\.2 and 2 more, which this"):
        load(files)


def test_a_wrong_shape_is_told_with_both_shapes():
    files = Files(spec_of())
    files.tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(15, 32)
    with pytest.raises(StartupError, match=r"k_proj\.weight is \[15, 32\] and should be \[16, 32\]"):
        load(files)


def test_rotary_buffers_and_a_tied_head_are_passed_over():
    files = Files(spec_of(tie_embeddings=True))
    files.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    files.tensors["lm_head.weight"] = files.tensors["model.embed_tokens.weight"]
    load(files)
    assert "lm_head.weight" not in files.read


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(StartupError, match=r"'mamba' is not known; known are: llama"):
        model_class(spec_of(architecture="mamba"))
    assert model_class(spec_of()) is Llama


def test_a_packed_linear_agrees_with_the_plain_one():
    torch.manual_seed(0)
    linear = Linear(64, 48, bias=True, dtype=torch.bfloat16)
    linear.weight.copy_(torch.randn(48, 64))
    linear.bias.copy_(torch.randn(48))
    for rows in (1, 5, 33):
        x, add = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 48).bfloat16()
        expected = x.float() @ linear.weight.float().T + linear.bias.float() + add.float()
        torch.testing.assert_close(linear(x, add=add).float(), expected, atol=0.2, rtol=0.02)
        packed = Linear(64, 48, bias=True, dtype=torch.bfloat16)
        packed.weight.copy_(linear.weight)
        packed.bias.copy_(linear.bias)
        packed.pack()
        assert packed.packed is not None
        assert packed.weight is None
        torch.testing.assert_close(packed(x, add=add).float(), expected, atol=0.2, rtol=0.02)
        torch.testing.assert_close(packed(x).float(), expected - add.float(), atol=0.2, rtol=0.02)
