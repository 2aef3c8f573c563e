"""The central scheduler: one loop over all sequences that want tokens computed, whatever for.

    plan   = schedule(now)         what the next step does; moves num_planned
    deltas = commit(result, now)   what a step did; moves num_computed

There are no phases (as in vLLM's v1 scheduler): chunked prefill, prefix hits, decode and recomputation after a
preemption are all "tokens that no plan holds yet" under one token budget, shared out every iteration anew (Yu et al.
2022, Orca) with decodes first, then prefill chunks (Agrawal et al. 2024, Sarathi-Serve), over paged blocks with
copy-on-write (Kwon et al. 2023, PagedAttention).

Pure decisions over values and ``now``: no clock, no torch, no Ray, no randomness, no sets in an order that matters.
This file knows nothing of text, replicas or ranks; residents.py gives seats and blocks, waiting.py orders the queue.
"""

from collections import deque

from paceline.cluster.engine import admission
from paceline.cluster.engine.blocks import BlockPool
from paceline.cluster.engine.config import EngineConfig
from paceline.cluster.engine.deadlines import Deadlines
from paceline.cluster.engine.draft import Draft
from paceline.cluster.engine.pace import Pace
from paceline.cluster.engine.record import Counters, StepRecord
from paceline.cluster.engine.residents import Residents
from paceline.cluster.engine.sequence import NEVER, NO_SLOT, Sequence
from paceline.cluster.engine.waiting import WaitingQueue
from paceline.proto.errors import FirstTokenTimeout, InvalidRequest, QueueTimeout
from paceline.proto.hashing import chain
from paceline.proto.load import ReplicaLoad
from paceline.proto.request import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    Request,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from paceline.proto.step import TAKE_NONE, TAKE_PROMPT_LOGPROBS, StepPlan, StepResult

SCAN_LEN = 16  # waiting sequences looked at behind a head that lacks blocks
NUM_RECORDS = 1024
NO_LIMIT = 1 << 30


class Scheduler:
    """Owned by one engine thread. ``pool`` may be given to fix the order of physical blocks."""

    def __init__(self, config: EngineConfig, pool: BlockPool | None = None):
        self.config = config
        self.pool = pool or BlockPool(config.num_blocks)
        self.waiting = WaitingQueue()
        self.deadlines = Deadlines()
        self.counters = Counters()
        self.residents = Residents(config.max_num_seqs, config.paging, self.pool, self.waiting, self.counters)
        self.records: deque[StepRecord] = deque(maxlen=NUM_RECORDS)
        self._requests: dict[str, list[Sequence]] = {}  # live choices of live requests
        self._pace = Pace(config.target_step_seconds, config.plan_budget)
        self._in_flight: deque[Draft] = deque()
        self._eos = frozenset(config.eos_ids)
        self._has_windows = any(config.windows)
        self._num_alive = 0  # choices, also those still to be forked
        self._stuck = False  # when last looked at, the waiting head found seats but no room
        self._next_arrival = 0
        self._next_step = 0

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queues a request. Raises RequestError, naming both numbers, for one that could never run, and Overloaded."""
        config, params = self.config, request.params
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id} is already running", "request_id")
        max_len = admission.max_len(request, config)
        admission.check_room(request, config, self._num_alive, self.waiting, self.records)
        # A grammar that has come to its end allows nothing but an end token.
        eos_counts = params.grammar or not params.ignore_eos
        stop_ids = self._eos if eos_counts else frozenset()  # one object for all: commit reads it for every id
        if params.stop_ids:
            stop_ids = stop_ids.union(params.stop_ids)
        resumed = bool(request.resume)
        choices = [
            Sequence(request, choice, self._next_arrival, max_len, stop_ids)
            for choice in range(params.n if resumed else 1)
        ]
        if not resumed:
            choices[0].num_to_fork = params.n - 1
        self._requests[request.request_id] = choices
        self._num_alive += params.n
        self.deadlines.watch(request, self._next_arrival, self._requests.__contains__)
        self._next_arrival += 1
        for seq in choices:
            if config.enable_prefix_caching and request.cache_root:
                seq.cacheable = True
                seq.hashes = list(request.block_hashes)
            self.waiting.join(request.tenant)
            self.waiting.push(seq)

    def abort(
        self, request_id: str, reason: str = FINISH_ABORT, error: str | None = None, error_code: str | None = None
    ) -> list[TokenDelta]:
        """Ends every choice of a request, in whatever state. Unknown and finished ids give nothing."""
        deltas = []
        for seq in list(self._requests.get(request_id, ())):
            deltas += self._end(seq, reason, error, error_code)
        return deltas

    def expire(self, now_unix: float) -> list[TokenDelta]:
        """Ends requests whose time has passed: for a first step, a first token, or as a whole. A request that has one
        choice with the step or the token it waited for has what its deadline asked."""
        deltas = []
        for request_id, arrival, leaf in self.deadlines.passed(now_unix):
            choices = self._requests.get(request_id, ())
            if not choices or choices[0].key[1] != arrival:
                continue  # it has ended; perhaps another one has its id
            n = choices[0].request.params.n
            if leaf is QueueTimeout and any(seq.started for seq in choices):
                continue
            # Forks, and the ends of choices, come after a first token.
            nobody_ended = len(choices) + sum(seq.num_to_fork for seq in choices) == n
            if leaf is FirstTokenTimeout and not (nobody_ended and all(not seq.num_generated for seq in choices)):
                continue
            deltas += self.abort(request_id, FINISH_ERROR, f"{leaf.code}: its time has passed", leaf.code)
        return deltas

    def finish(self, request_id: str, choice: int, num_ids: int) -> list[TokenDelta]:
        """Ends one choice as a success after ``num_ids`` emitted ids: a stop string was seen in its text."""
        for seq in self._requests.get(request_id, ()):
            if seq.choice == choice:
                return [self._finish(seq, FINISH_STOP, num_generated=min(num_ids, seq.num_generated))]
        return []

    def request_ids(self) -> list[str]:
        """Of everything that has not ended."""
        return list(self._requests)

    @property
    def running(self) -> list[Sequence]:
        return self.residents.running

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # -- schedule --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be planned before a result arrives."""
        draft = Draft(self._next_step, self.config.plan_budget, self._most_draws())
        prefilling = self._plan_decodes(draft)
        share = self._pace_prefills(draft)
        num_long, promised = self._plan_prefills(draft, prefilling, share)
        if self._requests:
            self._admit(draft, share, num_long, promised)
        if draft.waits_for in ("blocks", "long prefills"):
            self._stuck = True
        elif draft.admissions:
            self._stuck = False
        if not draft.rows:
            return None
        if self._has_windows:
            for seq in draft.rows[draft.num_decode :]:  # decodes let go when they need their next block
                self.residents.drop_passed(seq)
        plan = draft.plan(self.residents.take_releases())
        self._next_step += 1
        num_tokens = sum(draft.lens)
        self.counters.computed += num_tokens
        self._in_flight.append(draft)
        self.records.append(
            StepRecord(
                step_id=draft.step_id,
                time=now,
                num_rows=len(draft.rows),
                num_decode_tokens=draft.num_decode,
                num_prefill_tokens=num_tokens - draft.num_decode,
                num_running=len(self.running),
                num_waiting=len(self.waiting),
                blocks_used=self.pool.num_referenced,
                preempted=tuple(draft.preempted),
                head_waits_for=draft.waits_for,
            )
        )
        return plan

    def _most_draws(self) -> int:
        """Stages that work at the same time need as many plans, so none may take more than its share of those who draw.

        Whoever waits counts as long as it could come in: a batch that arrives at once is split at once.
        """
        num_plans = min(self.config.num_stages, self.config.depth)
        if num_plans == 1:
            return NO_LIMIT
        num_seqs = len(self.running)
        if not self.running or not self._stuck:
            num_seqs += min(len(self.waiting), self.residents.num_free_seats)
        return -(-num_seqs // num_plans)

    def _plan_decodes(self, draft: Draft) -> list[Sequence]:
        """A row for every running sequence that needs exactly one token; returns those that need more."""
        prefilling = []
        running, index, staged = self.running, 0, self.config.num_stages > 1
        while index < len(running):  # make_room may shorten the list behind index
            seq = running[index]
            index += 1
            if staged and seq.num_pending:
                continue  # the id it draws is known to the last stage only, until it comes back
            start = seq.num_planned
            if len(seq.token_ids) + seq.num_pending - start > 1:
                prefilling.append(seq)
                continue
            if start >= seq.compute_len or not draft.budget or not draft.draws:
                continue  # every id that max_tokens allows is planned; or the step is full
            if (start >= seq.capacity or start < seq.shared_end) and self.residents.make_room(
                draft, seq, start + 1
            ) == start:
                continue
            draft.put_chunk(seq, start + 1, 1)
        draft.num_decode = len(draft.rows)
        return prefilling

    def _pace_prefills(self, draft: Draft) -> int:
        """Cuts what is left of the budget to what streams can wait for. Returns the share of a long prompt."""
        share = self.config.long_prefill_threshold
        if draft.num_decode:
            paced = self._pace.num_prefill_tokens(draft.num_decode)
            if paced < draft.budget:
                draft.budget = paced
                share = min(share, -(-paced // 2))
        return share

    def _plan_prefills(self, draft: Draft, prefilling: list[Sequence], share: int) -> tuple[int, int]:
        """Chunks of running prompts. Returns how many long ones are still in prefill, and the blocks they will need."""
        threshold = self.config.long_prefill_threshold
        contended = len(prefilling) > 1 or len(self.waiting) > 0
        num_long = promised = 0
        for seq in prefilling:
            if seq.slot == NO_SLOT:
                continue  # preempted for an earlier one
            todo = seq.num_todo
            limit = share if todo > threshold and contended else todo
            end = seq.num_planned + min(limit, draft.budget)
            if end == len(seq.token_ids) and not draft.draws:
                end -= 1
            if end > seq.num_planned:
                end = self.residents.make_room(draft, seq, end)
            if end > seq.num_planned:
                self._put_prefill(draft, seq, end)
            num_long += seq.num_todo > threshold
            promised += self.residents.promise(seq)
        return num_long, promised

    def _admit(self, draft: Draft, share: int, num_long: int, promised: int) -> None:
        """Waiting sequences take seats while seats, budget and blocks last."""
        config, residents = self.config, self.residents
        threshold, block_size = config.long_prefill_threshold, config.block_size
        head: Sequence | None = None  # the first that lacks blocks
        for seq in self.waiting.first(residents.num_free_seats + SCAN_LEN):
            if not residents.num_free_seats or not draft.budget or not draft.draws:
                draft.waits_for = draft.waits_for or ("budget" if residents.num_free_seats else "seats")
                return
            if head is not None and head.num_bypassed >= config.max_bypasses:
                return
            hit = [] if seq.block_ids else residents.find_prefix(seq)
            todo = seq.num_todo - (len(hit[0]) * block_size if hit else 0)
            if todo > threshold and num_long >= config.max_partial_prefills:
                draft.waits_for = draft.waits_for or "long prefills"
                continue
            if not residents.fits(seq, hit, promised):
                if head is None:
                    head, draft.waits_for = seq, "blocks"
                continue
            residents.seat(draft, seq, hit)
            contended = bool(num_long) or len(self.waiting) > 0
            limit = share if todo > threshold and contended else todo
            end = residents.make_room(draft, seq, seq.num_planned + min(limit, draft.budget))
            if end > seq.num_planned:
                self._put_prefill(draft, seq, end)
            num_long += seq.num_todo > threshold
            promised += residents.promise(seq)
            if head is not None:
                head.num_bypassed += 1

    def _put_prefill(self, draft: Draft, seq: Sequence, end: int) -> None:
        """A chunk, and names for the known blocks that it fills: the next one in this very plan may share them."""
        # A fork holds its positions already and computes the prompt's last one again only for its logits.
        write = 0 if end <= seq.num_held else 1
        draft.put_chunk(seq, end, write, TAKE_PROMPT_LOGPROBS if end >= seq.untold else TAKE_NONE)
        filled = min(end // self.config.block_size, len(seq.hashes))
        if filled > seq.num_named:
            self.residents.name(seq, filled)

    # -- commit ----------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[TokenDelta]:
        """Takes in the oldest outstanding step; rows of an old epoch are dropped."""
        draft = self._in_flight.popleft()
        step_id, rows, lens = draft.step_id, draft.rows, draft.lens
        if step_id != result.step_id or len(rows) != len(result.num_ids):
            raise AssertionError(f"result of step {result.step_id} with {len(result.num_ids)} rows, expected {step_id}")
        self._pace.saw(draft.num_decode, sum(lens) - draft.num_decode, result.model_seconds)
        deltas: list[TokenDelta] = []
        ids, at = result.ids.tolist(), 0
        logprobs, prompt_logprobs, faults = result.logprobs, result.prompt_logprobs, result.faults
        contended = self.waiting.num_tenants > 1
        columns = zip(rows, result.epochs, lens, result.num_ids, strict=True)
        for row, (seq, epoch, length, count) in enumerate(columns):
            first, at = at, at + count
            if seq.epoch != epoch:
                continue
            if faults and row in faults:
                deltas += self._end(seq, FINISH_ERROR, faults[row])
                continue
            if contended:
                self.waiting.serve(seq.request.tenant, length)
            seq.num_computed += length
            if seq.num_computed >= seq.next_name_at:
                self._name_computed(seq)
            if prompt_logprobs and row in prompt_logprobs:
                deltas.append(self._tell(seq, length, prompt_logprobs[row]))
            if count:
                if seq.num_to_fork:
                    self._fork(seq)
                deltas.append(self._emit(seq, ids[first:at], logprobs.get(row) if logprobs else None))
            elif seq.num_computed == seq.max_len:  # max_tokens is 0: the prompt was all
                deltas += self._end(seq, FINISH_LENGTH)
        if self.config.check:
            self.check()
        return deltas

    def _name_computed(self, seq: Sequence) -> None:
        """Names for blocks that generated ids have filled; prompt blocks got theirs when they were planned."""
        block_size = self.config.block_size
        filled = seq.num_computed // block_size
        for index in range(len(seq.hashes), filled):
            parent = seq.hashes[-1] if seq.hashes else seq.request.cache_root
            seq.hashes.append(chain(parent, seq.token_ids[index * block_size : (index + 1) * block_size]))
        self.residents.name(seq, filled)

    def _fork(self, parent: Sequence) -> None:
        """The prompt is in the cache: the other choices begin, sharing its blocks; each recomputes one token for its
        logits and copies the last, partly filled block when it first writes into it."""
        request, num_prompt, block_size = parent.request, parent.num_prompt, self.config.block_size
        num_shared = -(-num_prompt // block_size)
        shared_end = num_shared * block_size if num_prompt % block_size else 0
        for choice in range(1, parent.num_to_fork + 1):
            child = Sequence(request, choice, parent.key[1], parent.max_len, parent.stop_ids)
            child.shared_end = shared_end
            child.num_planned = child.num_computed = num_prompt - 1
            child.num_held = num_prompt
            child.num_cached = parent.num_cached
            child.started = True
            child.cacheable = parent.cacheable
            child.hashes = list(parent.hashes)
            child.num_named = num_prompt // block_size if parent.cacheable else 0
            self._requests[request.request_id].append(child)
            self.waiting.join(request.tenant)
            self.residents.hold(child, parent, num_shared)
        parent.shared_end = shared_end
        parent.num_to_fork = 0

    def _emit(self, seq: Sequence, ids: list[int], logprobs: list[TokenLogprobs] | None) -> TokenDelta:
        token_ids = seq.token_ids
        offset = len(token_ids) - seq.num_prompt
        seq.num_pending -= 1
        reason = None
        for token in ids:
            token_ids.append(token)
            if token in seq.stop_ids and self._stops(seq, token):
                reason = FINISH_STOP
                break
            if len(token_ids) == seq.max_len:
                reason = FINISH_LENGTH
                break
        if reason:
            ids = token_ids[seq.num_prompt + offset :]
            self.counters.generated += len(ids)
            return self._finish(seq, reason, ids=ids, offset=offset, logprobs=logprobs)
        self.counters.generated += len(ids)
        return TokenDelta(request_id=seq.request_id, choice=seq.choice, offset=offset, ids=ids, logprobs=logprobs)

    def _stops(self, seq: Sequence, token: int) -> bool:
        """Whether a stop id that was just drawn ends the choice: not before min_tokens, but where a grammar ended."""
        params = seq.request.params
        return seq.num_generated > params.min_tokens or bool(params.grammar and token in self._eos)

    def _tell(self, seq: Sequence, length: int, logprobs: list[TokenLogprobs]) -> TokenDelta:
        """Of the prompt's ids that follow the ``length`` tokens just taken in: what was not told in an older epoch."""
        end, last = seq.num_computed, seq.num_prompt - 1
        start = end - length
        if len(logprobs) != min(end, last) - start:
            raise AssertionError(f"{len(logprobs)} prompt logprobs for positions {start} to {end} of {seq}")
        fresh = logprobs[seq.untold - start - 1 :]
        seq.untold = end + 1 if end < last else NEVER
        return TokenDelta(request_id=seq.request_id, choice=seq.choice, offset=0, ids=[], prompt_logprobs=fresh)

    # -- endings ---------------------------------------------------------------------------------------------------

    def _end(
        self, seq: Sequence, reason: str, error: str | None = None, error_code: str | None = None
    ) -> list[TokenDelta]:
        """Ends a choice and, where it still was to be forked, the choices that would have come out of it."""
        unborn = range(1, seq.num_to_fork + 1)
        seq.num_to_fork = 0
        deltas = [self._finish(seq, reason, error=error, error_code=error_code)]
        self._num_alive -= len(unborn)
        for choice in unborn:
            self._count_finish(reason)
            usage = Usage(seq.num_prompt, seq.num_cached, 0)
            deltas.append(
                TokenDelta(
                    request_id=seq.request_id,
                    choice=choice,
                    offset=0,
                    ids=[],
                    finish_reason=reason,
                    usage=usage,
                    error=error,
                    error_code=error_code,
                )
            )
        return deltas

    def _finish(
        self,
        seq: Sequence,
        reason: str,
        *,
        ids: list[int] | None = None,
        offset: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        num_generated: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> TokenDelta:
        """The one way out. The sequence keeps its ids and loses everything else; its last delta says why."""
        if num_generated is None:
            num_generated = seq.num_generated
        spent = seq.num_lost if seq.slot == NO_SLOT and not seq.block_ids else seq.num_planned
        if reason in (FINISH_STOP, FINISH_LENGTH):
            self.counters.discarded += max(0, spent - (seq.num_prompt + max(0, num_generated - 1)))
        self.residents.leave(seq)
        self._num_alive -= 1
        seq.finish_reason = reason
        choices = self._requests[seq.request_id]
        choices.remove(seq)
        if not choices:
            del self._requests[seq.request_id]
        self.waiting.leave(seq.request.tenant)
        self._count_finish(reason)
        return TokenDelta(
            request_id=seq.request_id,
            choice=seq.choice,
            offset=num_generated if offset is None else offset,
            ids=ids or [],
            logprobs=logprobs,
            finish_reason=reason,
            usage=Usage(seq.num_prompt, seq.num_cached, num_generated),
            error=error,
            error_code=error_code,
        )

    def _count_finish(self, reason: str) -> None:
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1

    # -- what others may know --------------------------------------------------------------------------------------

    def load(self, tokens_per_second: float = 0.0) -> ReplicaLoad:
        counters = self.counters
        waiting = self.waiting.all()
        return ReplicaLoad(
            step_id=self._next_step,
            running=len(self.running),
            waiting=len(waiting),
            queued_tokens=sum(s.num_todo for s in waiting) + sum(s.num_todo for s in self.running if s.num_todo > 1),
            tokens_per_second=tokens_per_second,
            blocks_used=self.pool.num_referenced,
            blocks_total=self.pool.num_blocks,
            prompt_tokens_total=counters.prompt,
            cached_prompt_tokens_total=counters.cached,
            generation_tokens_total=counters.generated,
            computed_tokens_total=counters.computed,
            recomputed_tokens_total=counters.recomputed,
            discarded_tokens_total=counters.discarded,
            preemptions_total=counters.preemptions,
            block_copies_total=counters.copies,
            finished_total=dict(counters.finished),
        )

    def check(self) -> None:
        """Every invariant that a step must keep, or AssertionError: after each step in tests, at idle in production."""
        waiting = self.waiting.all()
        alive = [seq for choices in self._requests.values() for seq in choices]
        assert sorted(s.key for s in alive) == sorted(s.key for s in self.running + waiting), "a sequence is lost"
        assert self._num_alive == len(alive) + sum(s.num_to_fork for s in alive), "a choice is counted wrongly"
        self.residents.check(waiting, alive)
        for seq in alive:
            length = len(seq.token_ids)
            assert seq.finish_reason is None
            assert 0 <= seq.num_computed <= seq.num_planned <= length + seq.num_pending, seq
            assert seq.num_planned <= seq.compute_len, seq
            assert seq.num_computed < seq.untold, f"{seq} has prompt logprobs that nobody was told"
            assert seq.num_planned <= seq.capacity, seq
            assert (seq.slot == NO_SLOT) == (seq not in self.running), seq
