"""Which models can be served, and how, from the registries: no torch, no model is looked at."""

from dataclasses import dataclass

from paceline.worker.gguf_families import FAMILIES
from paceline.worker.models import MODELS, architectures


@dataclass(frozen=True, slots=True)
class Supported:
    """A family that has a file in models/. ``architectures`` are Hugging Face's, ``gguf`` those of GGUF files."""

    name: str
    architectures: tuple[str, ...]
    gguf: tuple[str, ...]
    windows: bool  # some of its models have layers that look back only so far


def supported() -> list[Supported]:
    owners = {name: family.attribute for name, family in architectures().items()}
    return [
        Supported(
            name=name,
            architectures=family.architectures,
            gguf=tuple(
                gguf
                for gguf, facts in FAMILIES.items()
                if family.attribute in (owners.get(facts.hf), owners.get(facts.hf_windowed or ""))
            ),
            windows=family.windows,
        )
        for name, family in MODELS.items()
    ]
