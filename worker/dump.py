"""The file that a failing rank leaves behind: its config and its last plans, enough to run them again.

length  header     msgpack: magic, schema hash, config, pool size, context length, error
length  plan       as the channel carried it, oldest first
...                lengths are 4 bytes, little-endian
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from paceline.proto.codec import decode_plan, encode_step
from paceline.proto.errors import StartupError
from paceline.proto.step import StepPlan, schema_hash
from paceline.worker.config import RankConfig

MAGIC = "paceline.plans.v1"


class DumpHeader(msgspec.Struct, frozen=True, kw_only=True):
    config: RankConfig
    num_kv_blocks: int
    max_model_len: int
    error: str = ""
    magic: str = MAGIC
    schema: str = msgspec.field(default_factory=schema_hash)


def write_dump(path: Path, header: DumpHeader, plans: Iterable[StepPlan]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for frame in (msgspec.msgpack.encode(header), *(encode_step(plan) for plan in plans)):
            file.write(len(frame).to_bytes(4, "little") + frame)


def read_dump(path: Path) -> tuple[DumpHeader, list[StepPlan]]:
    """Raises StartupError for a file that is not a dump, or one of another version of the step's schema."""
    raw, at, frames = path.read_bytes(), 0, []
    while at + 4 <= len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        frames.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    try:
        header = msgspec.msgpack.decode(frames[0], type=DumpHeader) if frames else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        header = None
    if header is None or header.magic != MAGIC or at != len(raw):
        raise StartupError(f"{path} is not a dump of plans, or is cut short.")
    if header.schema != schema_hash():
        raise StartupError(f"{path} was written with step schema {header.schema}; this version has {schema_hash()}.")
    return header, [decode_plan(frame) for frame in frames[1:]]
