"""The small files of a Hugging Face folder, read: config.json to a spec, tokenizer files to a vocabulary.

What the fields of config.json mean is the families' knowledge (models/). Weights are checkpoint.py's. transformers is
used for what has no family alone: importing it takes seconds, and it fills gaps that are better refused.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.proto.errors import StartupError
from paceline.worker.checkpoint_base import Vocabulary, checked, with_bos
from paceline.worker.models import FALLBACK, architectures
from paceline.worker.models.config import Config, Json
from paceline.worker.models.spec import ModelSpec

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
    """``path`` is config.json's, for messages. Raises ``StartupError`` unless the config describes a model of a known
    family, or one that the fallback can serve, in plain weights."""
    fields, families = Config(config, path), architectures()
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise StartupError(
            f"{path} describes weights quantized by '{method}' (quantization_config), which is not supported; use the "
            "unquantized model or a GGUF file of it."
        )
    try:
        family = families.get(fields.architecture, FALLBACK).load()
    except ImportError as error:  # of transformers
        raise StartupError(
            f"{path} names architecture {fields.architecture}, for which there is no family here; more run through "
            f"transformers, which cannot be imported ({error}): pip install 'paceline[transformers]'. Without it these "
            f"are supported: {', '.join(families)}."
        ) from error
    return checked(family.spec_of(fields), path)


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
    """A token is written as a string or as an object with its content; ``add_bos_token`` is none, but true or false."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _ids(value: int | list[int] | None) -> list[int]:
    return [value] if isinstance(value, int) else list(value or [])
