"""A replica's life as its controller sees it: what is seen now decides the next state and what to do about it.

    PENDING ──▶ STARTING ──▶ LOADING ──▶ WARMING ──▶ READY ──▶ DRAINING
       ▲           │            │           │          │          │
       └── pause ──┴────────────┴── DEAD ◀──┴──────────┴──────────┘

Pure: no clock, no Ray, no wire. Decisions follow from what is there, not from what was done before, so that a
controller that has just started takes over what runs. ``now`` and all times are seconds of one monotonic clock.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a dead replica is started again, doubled each time
STABLE = 60.0  # seconds of READY after which earlier deaths are forgotten
START_SILENCE = 120.0  # seconds: importing and loading may keep a process from answering


class State(StrEnum):
    PENDING = "pending"  # waits for room in the cluster
    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"  # finishes what runs, takes nothing new
    DEAD = "dead"  # its successor comes after a pause, under the same name


WITH_PROCESS = (State.STARTING, State.LOADING, State.WARMING, State.READY, State.DRAINING)


class Action(StrEnum):
    PLACE = "place"  # see to it that room is asked for, and look whether it is there
    CREATE = "create"  # start a process in that room
    DRAIN = "drain"  # ask the process to drain
    END = "end"  # kill whatever is left of the process
    FORGET = "forget"  # it is gone, and wanted no more


@dataclass(frozen=True)
class Report:
    """What a replica says of itself."""

    state: str
    address: str = ""
    incarnation: str = ""
    description: str = ""  # on what was loaded, a line each rank


@dataclass(frozen=True)
class Rules:
    placement_timeout: float = 30.0
    silence: float = 60.0  # seconds that a replica in service may leave a question unanswered


@dataclass(frozen=True)
class Life:
    """``since``: the last change of state. ``num_deaths``: in a row, without a stable time between."""

    since: float
    state: State = State.PENDING
    reason: str = ""
    num_deaths: int = 0
    retry_at: float = 0.0


@dataclass(frozen=True)
class Sight:
    """What can be seen of a replica now. ``heard_at``: when its process, if there is one, answered or was found."""

    placed: bool = False  # the cluster holds room for it
    shortage: str = ""  # why not, for people
    exists: bool = False  # there is a process, or one was asked for
    report: Report | None = None
    heard_at: float = 0.0
    death: str = ""  # how its process ended
    leaving: bool = False  # it is wanted no more


def decide(life: Life, sight: Sight, now: float, rules: Rules) -> tuple[Life, Action | None]:
    """The next life and what to do; asked again and again, also when nothing has happened."""
    if life.state is State.DEAD:
        if sight.leaving:
            return life, Action.FORGET
        return (_to(life, State.PENDING, now), Action.PLACE) if now >= life.retry_at else (life, None)
    if not sight.exists:
        return _without_process(life, sight, now, rules)
    if sight.death:
        return _dead(life, sight.death, now), Action.END
    state = sight.report.state if sight.report else ""
    if state == "drained":
        return _dead(life, "drained", now, on_purpose=True), Action.END
    if now - sight.heard_at > (limit := _patience(life, state, rules)):
        return _dead(life, f"silent for {limit:.0f} s", now), Action.END
    if sight.leaving and state and state not in ("ready", "draining"):  # one not heard yet may serve
        return _dead(life, "wanted no more", now, on_purpose=True), Action.END
    if sight.leaving and state and life.state is not State.DRAINING:
        return _to(life, State.DRAINING, now), Action.DRAIN
    if life.state is State.DRAINING:
        return life, None  # until it says that it is drained, or dies
    if state in WITH_PROCESS:
        return _to(life, State(state), now), None
    return _to(life, State.STARTING if life.state is State.PENDING else life.state, now), None


def _without_process(life: Life, sight: Sight, now: float, rules: Rules) -> tuple[Life, Action | None]:
    if sight.leaving:
        return _dead(life, "wanted no more", now, on_purpose=True), Action.END
    if life.state is not State.PENDING:
        return _dead(life, "its process is gone", now), Action.END
    if sight.placed:
        return _to(life, State.STARTING, now), Action.CREATE
    late = now - life.since >= rules.placement_timeout
    return replace(life, reason=f"cannot place: {sight.shortage}" if late else ""), Action.PLACE


def _patience(life: Life, reported: str, rules: Rules) -> float:
    """One that has said that it serves must go on saying so, whatever it was taken for before."""
    if life.state in (State.READY, State.DRAINING) or reported in (State.READY, State.DRAINING):
        return rules.silence
    return max(rules.silence, START_SILENCE)


def _to(life: Life, state: State, now: float) -> Life:
    return life if state is life.state else replace(life, state=state, since=now, reason="")


def _dead(life: Life, reason: str, now: float, on_purpose: bool = False) -> Life:
    stable = life.state is State.READY and now - life.since >= STABLE
    num_deaths = 0 if on_purpose else 1 if stable else life.num_deaths + 1
    pause = min(FIRST_PAUSE * 2 ** min(num_deaths - 1, 10), LONGEST_PAUSE) if num_deaths else 0.0
    return Life(now, State.DEAD, reason, num_deaths, now + pause)
