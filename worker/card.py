"""The model card: what router and engine may know of the checkpoint that this rank serves. Reads no weights."""

import hashlib

from tokenizers import Tokenizer

from paceline.proto.errors import StartupError
from paceline.proto.model import KVGroup, ModelCard
from paceline.worker.checkpoint_base import Checkpoint
from paceline.worker.kv_groups import kv_groups


def make_card(
    checkpoint: Checkpoint,
    *,
    name: str,
    dtype: str,
    quantization: str | None = None,
    max_model_len: int,
    block_size: int,
) -> ModelCard:
    """``dtype`` is the one computed and cached in, ``quantization`` the weights'; ``max_model_len`` is what the KV pool
    allows, in tokens.

    Raises ``StartupError`` if the tokenizer cannot be built. Ends of sequence that no id of the tokenizer stands for
    are left out.
    """
    spec, vocabulary = checkpoint.spec, checkpoint.vocabulary
    vocab_size = min(_count_ids(checkpoint), spec.vocab_size)
    groups = tuple(
        KVGroup(
            num_layers=len(group.layers),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            dtype=dtype,
            window=group.window,
        )
        for group in kv_groups(spec)
    )
    return ModelCard(
        name=name,
        architecture=spec.architecture,
        fingerprint=fingerprint(checkpoint, dtype, quantization),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        kv_groups=groups,
        eos_ids=tuple(i for i in vocabulary.eos_ids if i < vocab_size),
        bos_id=vocabulary.bos_id,
        add_bos=vocabulary.add_bos,
        generation_defaults=checkpoint.generation_defaults,
        chat_template=vocabulary.chat_template,
        template_tokens=vocabulary.template_tokens,
        tokenizer_json=vocabulary.tokenizer_json,
    )


def fingerprint(checkpoint: Checkpoint, dtype: str, quantization: str | None = None) -> str:
    """sha256 in hex over all that decides which ids a text becomes and what is answered. Parts are length-prefixed."""
    vocabulary = checkpoint.vocabulary
    digest = hashlib.sha256(b"paceline.model.v1")
    numbers = f"{dtype} {quantization}" if quantization else dtype
    text = (numbers, vocabulary.tokenizer_json, vocabulary.chat_template or "")
    for part in (checkpoint.identity(), *(item.encode() for item in text)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _count_ids(checkpoint: Checkpoint) -> int:
    """One past the tokenizer's highest id. Embeddings are often padded beyond it; those rows mean nothing."""
    try:
        tokenizer = Tokenizer.from_str(checkpoint.vocabulary.tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise StartupError(
            f"The tokenizer of {checkpoint.path} cannot be built ({error}); use another file."
        ) from error
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
