"""The small files of a Hugging Face folder, read: config.json to a spec, tokenizer files to a vocabulary.

Old and new spellings are both read (rope_theta and rope_scaling, or transformers 5's rope_parameters). Weights are
checkpoint.py's. transformers is not used: importing it takes seconds, and it fills gaps that are better refused.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint_base import Vocabulary, checked, with_bos
from paceline.worker.models.spec import ModelSpec, RopeScaling

Json = dict[str, Any]
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
MISTRAL_WINDOW = 4096  # what a Mistral config means that has no sliding_window at all
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_json(path: Path, *, needed_for: str | None = None) -> Json:
    """The object in a file; a missing file is an error where ``needed_for`` says what lacks it, else empty."""
    if not path.exists():
        if needed_for:
            raise StartupError(f"{path.parent} has no {path.name}, which {needed_for} needs; download the whole model.")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} does not hold a JSON object; download it again.")
    return value


def read_spec(config: Json, path: Path) -> ModelSpec:
    """``path`` is config.json's, for messages. Raises ``StartupError`` unless the config describes a plain Llama."""
    architecture = (config.get("architectures") or ["nothing"])[0]
    if architecture not in ARCHITECTURES:
        raise StartupError(
            f"{path} names architecture {architecture}, which is not supported; supported: {', '.join(ARCHITECTURES)}."
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise StartupError(
            f"{path} describes weights quantized by '{method}' (quantization_config), which is not supported; use the "
            "unquantized model or a GGUF file of it."
        )
    max_position = _need_int(config, "max_position_embeddings", path)
    if architecture == "MistralForCausalLM":
        window = config.get("sliding_window", MISTRAL_WINDOW)
        if window is not None and window < max_position:
            raise StartupError(
                f"{path} asks for sliding_window {window}, which is not supported; a Mistral without one is."
            )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise StartupError(f"{path} asks for hidden_act '{activation}', which is not supported; supported: silu.")
    num_heads = _need_int(config, "num_attention_heads", path)
    hidden_size = _need_int(config, "hidden_size", path)
    bias = bool(config.get("attention_bias", False))
    theta, scaling = _read_rope(config, max_position, path)
    spec = ModelSpec(
        architecture="llama",
        hidden_size=hidden_size,
        intermediate_size=_need_int(config, "intermediate_size", path),
        num_layers=_need_int(config, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        vocab_size=_need_int(config, "vocab_size", path),
        max_position=max_position,
        norm_eps=float(_need(config, "rms_norm_eps", path)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
    return checked(spec, path)


def _read_rope(config: Json, max_position: int, path: Path) -> tuple[float, RopeScaling | None]:
    """Base and scaling. A parameter that a kind needs and the file lacks is an error, not a guess."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope: Json = config.get(field) or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise StartupError(f"{path} rotates a part of each head (partial_rotary_factor), which is not supported.")
    if kind == "default":
        return theta, None
    needed = {"linear": (), "dynamic": (), "yarn": (), "llama3": ("low_freq_factor", "high_freq_factor")}
    if kind not in needed:
        raise StartupError(
            f"{path} asks for rotary scaling '{kind}' ({field}), which is not supported; supported: default, "
            f"{', '.join(needed)}."
        )
    if kind == "llama3":
        _need(rope, "original_max_position_embeddings", path, field)
    for name in ("factor", *needed[kind]):
        _need(rope, name, path, field)
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    numbers = ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"]
    numbers += ["mscale", "mscale_all_dim"]
    given: dict[str, Any] = {name: float(rope[name]) for name in numbers if rope.get(name) is not None}
    return theta, RopeScaling(kind=kind, original_max_position=int(original or max_position), **given)


def _need(config: Json, field: str, path: Path, inside: str | None = None) -> Any:
    if config.get(field) is None:
        where = f"{inside}.{field}" if inside else field
        raise StartupError(f"{path} lacks the field {where}; take the config.json that the model was published with.")
    return config[field]


def _need_int(config: Json, field: str, path: Path) -> int:
    value = _need(config, field, path)
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"{path} has {field} {value!r}, which is no count; take the config.json as published.")
    return value


def read_vocabulary(folder: Path, config: Json, generation: Json) -> Vocabulary:
    """Raises ``StartupError`` without a readable tokenizer.json. Ends: those of the generation config (else of the
    config), and the tokenizer's own eos token."""
    path = folder / "tokenizer.json"
    read_json(path, needed_for="the tokenizer")
    tokenizer_json = path.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise StartupError(f"{path} cannot be read by the tokenizers library ({error}); download it again.") from error
    settings = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    named = {name: text for name, value in settings.items() if name.endswith("_token") and (text := _text(value))}
    bos, eos = named.get("bos_token"), named.get("eos_token")
    bos_id = tokenizer.token_to_id(bos) if bos else None
    ends = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    if eos and (eos_id := tokenizer.token_to_id(eos)) is not None:
        ends = [*ends, eos_id]
    adds = bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]
    add_bos = bool(settings.get("add_bos_token", adds)) and bos_id is not None
    if add_bos != adds:  # the setting wins over the file's post-processor, which must then say the same
        tokenizer_json = with_bos(tokenizer_json, (bos, bos_id) if add_bos and bos and bos_id is not None else None)
    return Vocabulary(
        tokenizer_json=tokenizer_json,
        chat_template=_read_template(folder, settings),
        template_tokens=named,
        bos_id=bos_id,
        add_bos=add_bos,
        eos_ids=tuple(dict.fromkeys(ends)),
    )


def read_generation_defaults(generation: Json) -> dict[str, float | int]:
    """What the authors recommend for sampling. ``do_sample`` false means that they recommend greedy decoding without
    saying how to sample, so the rest of such a file says nothing about requests that do."""
    names = SAMPLING_DEFAULTS if generation.get("do_sample") is not False else ("repetition_penalty",)
    return {name: generation[name] for name in names if generation.get(name) is not None}


def _read_template(folder: Path, settings: Json) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _text(value: Any) -> str | None:
    """A token is written as a string or as an object with its content."""
    return value.get("content") if isinstance(value, dict) else value


def _ids(value: int | list[int] | None) -> list[int]:
    return [value] if isinstance(value, int) else list(value or [])
