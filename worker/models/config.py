"""A config.json, field by field, and how most of them become a `ModelSpec`. Knows no family and no file but this one.

A family reads its own fields and calls `decoder_spec` for the rest. Old and new spellings are both read (rope_theta and
rope_scaling, or transformers 5's rope_parameters). What is not supported is refused with the field's name.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from paceline.proto.errors import StartupError
from paceline.worker.layers.activation import ACTIVATIONS
from paceline.worker.models.spec import ModelSpec, RopeScaling

Json = dict[str, Any]

# kind of rotary scaling -> the parameters without which it means nothing
ROPE_KINDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("original_max_position_embeddings", "factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
WINDOWED = "sliding_attention"  # in layer_types


class Config:
    """The JSON object. ``path`` is for messages, ``within`` the field of the file that holds the object, if it is not
    the whole. Fields go by Llama's names: ``aliases`` says which of them this file calls otherwise."""

    def __init__(self, values: Json, path: Path, within: str = "", aliases: dict[str, str] | None = None):
        self.values, self.path, self.within = values, path, within
        self.aliases = aliases or {}

    @property
    def architecture(self) -> str:
        return (self.values.get("architectures") or ["nothing"])[0]

    def called(self, **aliases: str) -> "Config":
        """The same where ``ours`` stands as ``theirs``: called(hidden_size="n_embd")."""
        return Config(self.values, self.path, self.within, self.aliases | aliases)

    def defaults(self, **values: Any) -> "Config":
        """The same, where a field that is missing, by the file's own name, has this value. One that is null stays null:
        it means none."""
        return Config(values | self.values, self.path, self.within, self.aliases)

    def inner(self, field: str) -> "Config":
        """The object in a field; empty where there is none. Its fields have no aliases."""
        return Config(self.get(field) or {}, self.path, self._place(field))

    def get(self, field: str, default: Any = None) -> Any:
        """``default`` where the field is missing or null."""
        value = self.values.get(self.aliases.get(field, field))
        return default if value is None else value

    def need(self, field: str) -> Any:
        """Raises StartupError where the field is missing or null."""
        value = self.get(field)
        if value is None:
            raise StartupError(
                f"{self.path} lacks the field {self._place(field)}; take the config.json that the model was published "
                "with."
            )
        return value

    def need_int(self, field: str) -> int:
        """A count, 1 or more."""
        value = self.need(field)
        if not isinstance(value, int) or value < 1:
            raise StartupError(
                f"{self.path} has {self._place(field)} {value!r}, which is no count; take the config.json as published."
            )
        return value

    def need_float(self, field: str) -> float:
        value = self.need(field)
        if not isinstance(value, int | float):
            raise StartupError(
                f"{self.path} has {self._place(field)} {value!r}, which is no number; take the config.json as "
                "published."
            )
        return float(value)

    def refuse(self, field: str, supported: Iterable[Any]) -> NoReturn:
        """Says that the field's value is not supported, and what is."""
        told = ", ".join(map(str, supported))
        raise StartupError(
            f"{self.path} asks for {self._place(field)} {self.get(field)!r}, which is not supported; supported: {told}."
        )

    def only(self, field: str, *supported: Any) -> None:
        """Refuses any other value than these; a field that is missing or null means the first."""
        if self.get(field, supported[0]) not in supported:
            self.refuse(field, supported)

    def _place(self, field: str) -> str:
        name = self.aliases.get(field, field)
        return f"{self.within}.{name}" if self.within else name


def decoder_spec(config: Config, architecture: str, **differences: Any) -> ModelSpec:
    """The spec by the fields that most files share; a field of the spec that is among ``differences`` is not read.

    Layers have no windows unless ``windows`` says so: see `layer_windows`.
    """
    fields = {"architecture": architecture, **differences}
    for name, read in FIELDS.items():
        if name not in fields:
            fields[name] = read(config, fields)
    for name, value in _rope(config, fields).items():
        fields.setdefault(name, value)
    return ModelSpec(**fields)


# field of the spec -> its reading, which sees the fields read before it
FIELDS: dict[str, Callable[[Config, dict[str, Any]], Any]] = {
    "hidden_size": lambda c, known: c.need_int("hidden_size"),
    "intermediate_size": lambda c, known: c.need_int("intermediate_size"),
    "num_layers": lambda c, known: c.need_int("num_hidden_layers"),
    "num_heads": lambda c, known: c.need_int("num_attention_heads"),
    "num_kv_heads": lambda c, known: int(c.get("num_key_value_heads", known["num_heads"])),
    "head_dim": lambda c, known: int(c.get("head_dim") or known["hidden_size"] // known["num_heads"]),
    "vocab_size": lambda c, known: c.need_int("vocab_size"),
    "max_position": lambda c, known: c.need_int("max_position_embeddings"),
    "norm_eps": lambda c, known: c.need_float("rms_norm_eps"),
    "tie_embeddings": lambda c, known: bool(c.get("tie_word_embeddings", False)),
    "attention_bias": lambda c, known: bool(c.get("attention_bias", False)),
    "attention_out_bias": lambda c, known: known["attention_bias"],
    "mlp_bias": lambda c, known: bool(c.get("mlp_bias", False)),
    "activation": lambda c, known: read_activation(c),
}


def read_activation(config: Config, field: str = "hidden_act", default: str = "silu") -> str:
    name = config.get(field, default)
    if name not in ACTIVATIONS:
        config.refuse(field, ACTIVATIONS)
    return name


def layer_windows(config: Config, window: int | None, default: Callable[[int], bool]) -> tuple[int, ...]:
    """Each layer's window in tokens, 0 where it sees all; empty where all do.

    ``layer_types`` says which layers have it, or, where the file has none, ``default`` of the layer's number. A window
    that no sequence outgrows stays: such layers may be rotated otherwise than those that see all.
    """
    num_layers = config.need_int("num_hidden_layers")
    if not window:
        return ()
    types = config.get("layer_types") or [WINDOWED if default(i) else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or not {WINDOWED, "full_attention"}.issuperset(types):
        config.refuse("layer_types", [f"{num_layers} times {WINDOWED} or full_attention"])
    return tuple(int(window) if kind == WINDOWED else 0 for kind in types) if WINDOWED in types else ()


def even_windows(config: Config, window: int | None) -> tuple[int, ...]:
    """The same for all layers, whatever ``layer_types`` says; empty where no sequence outgrows it."""
    if window and window >= config.need_int("max_position_embeddings"):
        return ()
    without = Config(config.values | {"layer_types": None}, config.path, config.within, config.aliases)
    return layer_windows(without, window, lambda layer: True)


def _rope(config: Config, known: dict[str, Any]) -> dict[str, Any]:
    """Base, scaling and rotated entries as fields of the spec. A parameter that a kind needs and the file lacks is an
    error, not a guess."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.inner(field)
    fields: dict[str, Any] = {}
    if "full_attention" in rope.values or WINDOWED in rope.values:  # by kind of layer
        local, rope = rope.inner(WINDOWED), rope.inner("full_attention")
        local.only("rope_type", "default")
        fields["local_rope_theta"] = local.need_float("rope_theta")
    fields["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        fields["rotary_dim"] = int(known["head_dim"] * part)
    fields["rope_scaling"] = _rope_scaling(config, rope, known["max_position"])
    return fields


def _rope_scaling(config: Config, rope: Config, max_position: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "su":  # longrope's first name
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise StartupError(
            f"{rope.path} asks for rotary scaling '{kind}' ({rope.within}), which is not supported; supported: "
            f"default, {', '.join(ROPE_KINDS)}."
        )
    for name in ROPE_KINDS[kind]:
        rope.need(name)
    rope.only("truncate", True)
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind == "longrope":  # where both are given, Phi's files mean the outer one
        original = config.get("original_max_position_embeddings") or original
    fields: dict[str, Any] = {name: float(rope.values[name]) for name in ROPE_NUMBERS if rope.get(name) is not None}
    original = int(original or max_position)
    if kind == "longrope":
        for row in ("short_factor", "long_factor"):
            fields[f"{row}s"] = tuple(map(float, rope.need(row)))
        fields.setdefault("factor", max_position / original)
    return RopeScaling(kind=kind, original_max_position=original, **fields)
