"""Families by name, imported when one is chosen. To add one: a file here, and a line below."""

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from paceline.proto.errors import StartupError
from paceline.worker.models.spec import ModelSpec

if TYPE_CHECKING:
    from paceline.worker.models.decoder import CausalLM


class Family(NamedTuple):
    module: str
    attribute: str  # its class
    architectures: tuple[str, ...]  # as Hugging Face's config.json names them
    windows: bool = False  # some of its models have layers that look back only so far

    def load(self) -> "type[CausalLM]":
        return getattr(import_module(f"paceline.worker.models.{self.module}"), self.attribute)


# a spec's architecture -> who computes it
MODELS = {
    "llama": Family("llama", "Llama", ("LlamaForCausalLM",)),
    "mistral": Family("llama", "Mistral", ("MistralForCausalLM",), windows=True),
    "qwen2": Family("qwen", "Qwen2", ("Qwen2ForCausalLM",), windows=True),
    "qwen3": Family("qwen", "Qwen3", ("Qwen3ForCausalLM",), windows=True),
    "gemma": Family("gemma", "Gemma", ("GemmaForCausalLM",)),
    "gemma2": Family("gemma", "Gemma2", ("Gemma2ForCausalLM",), windows=True),
    "gemma3": Family("gemma", "Gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), windows=True),
    "phi3": Family("phi", "Phi3", ("Phi3ForCausalLM",), windows=True),
    "exaone": Family("exaone", "Exaone", ("ExaoneForCausalLM",)),
    "exaone4": Family("exaone", "Exaone4", ("Exaone4ForCausalLM",), windows=True),
    "smollm3": Family("smollm3", "SmolLM3", ("SmolLM3ForCausalLM",), windows=True),
    "olmo2": Family("olmo", "Olmo2", ("Olmo2ForCausalLM",)),
    "olmo3": Family("olmo", "Olmo3", ("Olmo3ForCausalLM",), windows=True),
    "cohere2": Family("cohere", "Cohere2", ("Cohere2ForCausalLM",), windows=True),
    "gpt2": Family("gpt2", "GPT2", ("GPT2LMHeadModel",)),
    "neox": Family("neox", "NeoX", ("GPTNeoXForCausalLM",)),
    "granite": Family("granite", "Granite", ("GraniteForCausalLM",)),
}


# Whatever else transformers has, by its own modeling; needs the extra of that name.
FALLBACK = Family("fallback", "Fallback", (), windows=True)


def model_class(spec: ModelSpec) -> "type[CausalLM]":
    """Raises StartupError for an architecture that is not known."""
    if spec.config:
        return FALLBACK.load()
    if spec.architecture not in MODELS:
        known = ", ".join(MODELS)
        raise StartupError(f"The model's architecture {spec.architecture!r} is not known; known are: {known}.")
    return MODELS[spec.architecture].load()


def architectures() -> dict[str, Family]:
    """Hugging Face's name -> family."""
    return {name: family for family in MODELS.values() for name in family.architectures}
