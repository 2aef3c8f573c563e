"""What the scheduler refuses before it queues anything: what can never run, and what it has no place for now. Pure."""

import math
from collections.abc import Sequence

from paceline.cluster.engine.config import EngineConfig
from paceline.cluster.engine.record import StepRecord
from paceline.cluster.engine.waiting import WaitingQueue
from paceline.proto.errors import ContextLengthExceeded, InvalidRequest, KVPoolExceeded, Overloaded
from paceline.proto.request import Request

PACE_STEPS = 64  # steps over which the pace is measured
LONGEST_RETRY = 60  # seconds


def max_len(request: Request, config: EngineConfig) -> int:
    """Prompt and all ids that a choice may emit. Raises RequestError, naming both numbers, for what could never run."""
    params, num_prompt = request.params, len(request.prompt_ids)
    if not num_prompt:
        raise InvalidRequest("the prompt has no tokens", "prompt")
    if params.max_tokens is not None and params.max_tokens < 0:
        raise InvalidRequest("max_tokens must be at least 0", "max_tokens")
    most = config.max_model_len if params.max_tokens is None else params.max_tokens
    if request.resume and (len(request.resume) != params.n or any(len(ids) >= most for ids in request.resume)):
        raise InvalidRequest("resume needs one list per choice, each shorter than max_tokens", "resume")
    if request.priority and config.scheduling_policy == "fcfs":
        raise InvalidRequest("this server schedules first come, first served: leave out priority", "priority")
    paging = config.paging
    room = paging.longest(config.num_blocks, config.max_model_len) - num_prompt
    max_tokens = max(room, 1) if params.max_tokens is None else params.max_tokens
    length = num_prompt + max_tokens
    if length > config.max_model_len:
        raise ContextLengthExceeded(
            f"the context holds {config.max_model_len} tokens: the prompt has {num_prompt} and max_tokens asks for "
            f"{max_tokens} more",
            "max_tokens" if num_prompt < config.max_model_len else "prompt",
        )
    needed = paging.num_blocks(length)
    if needed > config.num_blocks:
        raise KVPoolExceeded(
            f"prompt and max_tokens need {needed} KV blocks of {config.block_size} tokens, the pool has "
            f"{config.num_blocks}: send less, or start with more --num-kv-blocks",
            "max_tokens",
        )
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but no more than {max_tokens} tokens may be generated", "min_tokens"
        )
    return length


def check_room(
    request: Request, config: EngineConfig, num_alive: int, waiting: WaitingQueue, records: Sequence[StepRecord]
) -> None:
    """Raises Overloaded when the queue is full. ``num_alive``: choices that run, wait or are still to be forked.

    Seats that are free count as places: who finds one waits for no longer than a step. Where tokens are limited one
    request may still wait alone, however long it is.
    """
    n, max_tokens = request.params.n, config.max_waiting_tokens
    if config.max_waiting_requests:
        places = config.max_num_seqs + config.max_waiting_requests
        if n > places:
            raise InvalidRequest(f"{n} choices are asked for; {places} may run and wait here", "n")
        if num_alive + n > places:
            message = f"{num_alive} of {places} places are taken"
            raise Overloaded(message, retry_after=_drain(_num_tokens(waiting), records))
    if max_tokens and (num_tokens := _num_tokens(waiting)) and num_tokens + len(request.prompt_ids) > max_tokens:
        message = f"{num_tokens} tokens wait to be computed, {max_tokens} may"
        raise Overloaded(message, retry_after=_drain(num_tokens, records))


def _num_tokens(waiting: WaitingQueue) -> int:
    return sum(seq.num_todo for seq in waiting.all())


def _drain(num_tokens: int, records: Sequence[StepRecord]) -> int:
    """Seconds until so many tokens are computed, at the pace of the last steps: whole, and at least one."""
    last = [records[i] for i in range(max(0, len(records) - PACE_STEPS), len(records))]
    seconds = last[-1].time - last[0].time if last else 0.0
    done = sum(record.num_decode_tokens + record.num_prefill_tokens for record in last[:-1])
    return min(LONGEST_RETRY, max(1, math.ceil(num_tokens * seconds / done))) if done else 1
