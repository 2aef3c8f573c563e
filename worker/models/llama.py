"""Llama 1 to 3.x and what shares its shape (SmolLM, TinyLlama, Yi, ...): the shared decoder as it stands."""

from paceline.worker.models.decoder import CausalLM


class Llama(CausalLM):
    """Pre-norm RMSNorm, rotary grouped-query attention, gated SiLU MLP; biases and a tied head where the spec says."""
