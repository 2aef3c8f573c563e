"""What an engine and its ranks say to each other, and the one format of frames for it. Knows no sockets and no torch.

A frame is one byte that says what it is, then msgpack: a plan (engine to ranks, the same bytes to each), a result (the
sampling rank to its engine) or a control. In order, in both directions.

    rank    Hello ............... Facts ........ Phase* Ready   Pong   Result   Fault
    engine          Assign .............. Go .................. Ping   Plan     Stop
"""

import platform
from importlib.metadata import version

import msgspec

from paceline.proto import codec
from paceline.proto.load import RankMemory
from paceline.proto.model import ModelCard
from paceline.proto.step import StepPlan, StepResult, schema_hash
from paceline.worker.config import RankConfig

PLAN, RESULT, CONTROL = b"P", b"R", b"C"


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a process can say of itself before torch is there. ``index`` is its launcher's number, not yet a rank's.

    ``node`` keeps apart what the launcher keeps apart: Ray's node, else the host. ``ip`` and ``interface`` are those by
    which it reached the engine. ``devices``: which ones it was given, for their order; "" where it sees all. Bytes.
    """

    index: int
    host: str
    node: str
    ip: str
    interface: str
    pid: int
    cores: int
    devices: str
    free_shared_memory: int  # of /dev/shm
    python: str = ".".join(platform.python_version_tuple()[:2])
    paceline: str = version("paceline")
    step_schema: str = schema_hash()


class Assign(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``rank`` in the gang, the ``local_rank``-th on its host."""

    rank: int
    local_rank: int
    num_threads: int
    config: RankConfig
    log_format: str
    log_level: str


class Facts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a rank found before it speaks to another rank. ``trouble``: why it cannot start; the rest is then partly
    empty. ``device_id`` is one physical device's; "" on a CPU. ``model`` is a hash of weights, config and tokenizer.
    ``shared_memory_needed``: bytes of /dev/shm that this rank will take. ``port``: where rank 0 will meet the others.
    """

    trouble: str = ""
    device_kind: str = ""
    device_name: str = ""
    device_id: str = ""
    free_device_memory: int = 0
    free_host_memory: int = 0
    torch: str = ""
    dtype: str = ""
    backend: str = ""
    model: str = ""
    shared_memory_needed: int = 0
    port: int = 0


class Go(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All facts agree: meet at rank 0 and load. ``timeout``: seconds that meeting may take."""

    host: str
    port: int
    timeout: float


class Phase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A phase of the start is done."""

    name: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Plans may come. Only the sampling rank has a card."""

    memory: RankMemory
    num_blocks: int
    description: str
    card: ModelCard | None = None


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank ends. One sentence; its log has the rest."""

    message: str


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To an idle rank: answered in turn, by a Pong."""


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No more plans will come: end."""


Control = Hello | Assign | Facts | Go | Phase | Ready | Fault | Ping | Pong | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode(message: StepPlan | StepResult | Control) -> bytes:
    if isinstance(message, StepPlan):
        return PLAN + codec.encode_step(message)
    if isinstance(message, StepResult):
        return RESULT + codec.encode_step(message)
    return CONTROL + _encoder.encode(message)


def decode(frame: bytes) -> StepPlan | StepResult | Control:
    """Raises msgspec.DecodeError for what another version may have sent."""
    kind, body = frame[:1], frame[1:]
    if kind == PLAN:
        return codec.decode_plan(body)
    if kind == RESULT:
        return codec.decode_result(body)
    if kind == CONTROL:
        return _decoder.decode(body)
    raise msgspec.DecodeError(f"a frame begins with {kind!r}")
