"""What the scheduler remembers of its work: one record a step, and counters that never fall."""

from dataclasses import dataclass, field

import msgspec


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Feeds metrics, the ledger and the watchdog. ``preempted`` pairs (victim, the request it made room for)."""

    step_id: int
    time: float  # when it was planned
    num_rows: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    blocks_used: int
    preempted: tuple[tuple[str, str], ...] = ()
    head_waits_for: str | None = None  # seats, budget, blocks or long prefills


@dataclass(slots=True)
class Counters:
    """Tokens, but for preemptions, copies and finishes. For sequences that ended by themselves, whatever happened:

    computed = sum(len - 1 - skipped) + recomputed + discarded

    (the last id that a sequence emits is never computed, so one that emits nothing adds a whole len; what was skipped
    came from the prefix cache or from a parent).
    """

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    computed: int = 0
    recomputed: int = 0
    discarded: int = 0
    preemptions: int = 0
    copies: int = 0
    finished: dict[str, int] = field(default_factory=dict)
