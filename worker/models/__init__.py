"""Architectures by name, imported when one is chosen. To add one: a file here, and a line below."""

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.proto.errors import StartupError
from paceline.worker.models.spec import ModelSpec

if TYPE_CHECKING:
    from paceline.worker.models.decoder import CausalLM

MODELS = {
    "llama": ("paceline.worker.models.llama", "Llama"),
}


def model_class(spec: ModelSpec) -> "type[CausalLM]":
    """Raises StartupError for an architecture that is not known."""
    if spec.architecture not in MODELS:
        known = ", ".join(MODELS)
        raise StartupError(f"The model's architecture {spec.architecture!r} is not known; known are: {known}.")
    module, attribute = MODELS[spec.architecture]
    return getattr(import_module(module), attribute)
