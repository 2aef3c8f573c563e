"""Names for the content of KV blocks: a chained sha256, the same on every host and Python version.

Two blocks have one name only if all that their keys and values depend on is equal: the model (fingerprint), adapter,
KV dtype, tenant salt and every token up to the block's end. A cryptographic hash, because a collision would hand one
user's context to another.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from itertools import islice

from paceline.proto.model import ModelCard

DIGEST_SIZE = 32


def root(fingerprint: str, kv_dtype: str, adapter: str = "", salts: Sequence[str] = ()) -> bytes:
    """The parent of every first block. Parts are length-prefixed so that no two sets of parts read alike.

    ``salts``: of the tenant, of the request: blocks are shared only where all of them are equal.
    """
    digest = hashlib.sha256(b"paceline.kv.v1")
    for part in (fingerprint, kv_dtype, adapter, *(salts or ("",))):
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return digest.digest()


def root_of(card: ModelCard, adapter: str = "", salts: Sequence[str] = ()) -> bytes:
    return root(card.fingerprint, card.kv_groups[0].dtype, adapter, salts)


def chain(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block that holds ``token_ids`` and follows ``parent``."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(parent + ids.tobytes()).digest()


def prompt_hashes(parent: bytes, prompt_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Names of the prompt's full blocks, first to last."""
    tokens = iter(prompt_ids)
    names = []
    for _ in range(len(prompt_ids) // block_size):
        parent = chain(parent, list(islice(tokens, block_size)))
        names.append(parent)
    return tuple(names)
