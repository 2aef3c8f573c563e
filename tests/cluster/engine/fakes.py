"""An executor without a model, and builders for requests and schedulers."""

from array import array
from collections import deque
from collections.abc import Callable

from paceline.cluster.engine.blocks import BlockPool
from paceline.cluster.engine.config import EngineConfig
from paceline.cluster.engine.executor import Executor
from paceline.cluster.engine.scheduler import Scheduler
from paceline.proto import hashing
from paceline.proto.request import Request, SamplingParams, TokenDelta, TokenLogprobs
from paceline.proto.step import TAKE_PROMPT_LOGPROBS, TAKE_SAMPLE, TOKEN_IN_TABLE, StepPlan, StepResult

BLOCK = 16
ROOT = hashing.root("test", "float32")


def scripted(prompt: tuple[int, ...], choice: int, position: int) -> int:
    """The id that the fake model puts at ``position``: a function of prompt, choice and position only."""
    return (sum(prompt) * 31 + choice * 7919 + position * 104729) % 50021


Script = Callable[[tuple[int, ...], int, int], int]


def drawn(script: Script, prompt: tuple[int, ...], choice: int, position: int, params: SamplingParams, eos_ids) -> int:
    """The script's id, as a rank would let it pass: nothing that ends before min_tokens. A fake grammar allows but the
    script's id, whatever min_tokens says, and after as many ids as its text says an end token."""
    index = position - len(prompt)
    if params.grammar and index >= int(params.grammar):
        return eos_ids[0]
    token = script(prompt, choice, position)
    while not params.grammar and index < params.min_tokens and (token in eos_ids or token in params.stop_ids):
        token += 1
    return token


def prompt_logprobs_at(ids: list[int], position: int) -> TokenLogprobs:
    """What the fake model says of the id at ``position``."""
    return TokenLogprobs(-float(position), [ids[position]], [-float(position)])


class FakeExecutor(Executor):
    """Keeps a rank's state as plans dictate it and draws scripted ids; refuses plans that break the rank's contract.

    Blocks hold which ids were written where, and for which group, so that in every group a row reads back exactly its
    own sequence, as far as the windows of its queries reach, or the test fails.
    ``staged``: a first stage, which never hears what the last one draws but by a later plan. ``windows``: by KV group.
    ``seconds``: that a plan is said to have taken.
    """

    def __init__(
        self,
        script: Script = scripted,
        faults: dict | None = None,
        staged: bool = False,
        windows: tuple[int, ...] = (0,),
        eos_ids: tuple[int, ...] = (),
        seconds: Callable[[StepPlan], float] = lambda plan: 0.0,
    ):
        self.seconds = seconds
        self.eos_ids = eos_ids
        self.staged = staged
        self.windows = windows
        self.script = script
        self.faults = faults or {}  # step id -> rows that fail
        self.slots: dict[int, dict] = {}
        self.cache: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> group, id written there
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.num_copies = 0

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._apply(plan)
        for row in range(len(plan.chunk_slots)):
            self._write(plan, row)
        num_ids, ids, prompt_logprobs = array("i"), array("i"), {}
        faults = {row: "injected" for row in self.faults.get(plan.step_id, ()) if row < len(plan.chunk_slots)}
        for row in range(len(plan.chunk_slots)):
            self._read(plan, row)
            takes = 0 if row in faults else plan.chunk_takes[row]
            if takes & TAKE_PROMPT_LOGPROBS:
                prompt_logprobs[row] = self._prompt_logprobs(plan, row)
            num_ids.append(int(bool(takes & TAKE_SAMPLE)))
            if takes & TAKE_SAMPLE:
                state = self.slots[plan.chunk_slots[row]]
                end = plan.chunk_starts[row] + plan.chunk_lens[row]
                prompt, params = tuple(state["ids"][: state["num_prompt"]]), state["params"]
                assert params.max_tokens != 0, "an id is drawn for nobody"
                token = drawn(self.script, prompt, state["choice"], end, params, self.eos_ids)
                if not self.staged:
                    self._set(state, end, token)
                ids.append(token)
        self.results.append(
            StepResult(
                step_id=plan.step_id,
                epochs=plan.chunk_epochs,
                num_ids=num_ids,
                ids=ids,
                prompt_logprobs=prompt_logprobs,
                faults=faults,
                model_seconds=self.seconds(plan),
            )
        )

    def collect(self) -> StepResult:
        return self.results.popleft()

    def close(self) -> None:
        self.slots.clear()

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            self.slots.pop(slot, None)
        for init in plan.admissions:
            assert init.slot not in self.slots, "a slot was given away twice"
            self.slots[init.slot] = {
                "epoch": init.epoch,
                "ids": list(init.token_ids),
                "num_prompt": init.num_prompt,
                "choice": init.choice,
                "params": init.params,
                "table": {},
            }
        writes = zip(plan.table_slots, plan.table_groups, plan.table_indices, plan.table_blocks, strict=True)
        for slot, group, index, block in writes:
            assert block > 0
            self.slots[slot]["table"][group, index] = block
        for group, src, dst in zip(plan.copy_groups, plan.copy_srcs, plan.copy_dsts, strict=True):
            self.num_copies += 1
            assert self.cache[src, 0][0] == group, "a block of another group is copied"
            for offset in range(BLOCK):
                if (src, offset) in self.cache:
                    self.cache[dst, offset] = self.cache[src, offset]

    def _write(self, plan: StepPlan, row: int) -> None:
        state = self.slots[plan.chunk_slots[row]]
        assert state["epoch"] == plan.chunk_epochs[row]
        start, length = plan.chunk_starts[row], plan.chunk_lens[row]
        if plan.chunk_tokens[row] != TOKEN_IN_TABLE:
            assert length == 1
            self._set(state, start, plan.chunk_tokens[row])
        if plan.chunk_writes[row]:
            for position in range(start, start + length):
                assert position < len(state["ids"]), f"row {row} computes an id that this rank was never told"
                for group in range(len(self.windows)):
                    block = state["table"][group, position // BLOCK]
                    self.cache[block, position % BLOCK] = group, state["ids"][position]

    def _read(self, plan: StepPlan, row: int) -> None:
        state = self.slots[plan.chunk_slots[row]]
        start, end = plan.chunk_starts[row], plan.chunk_starts[row] + plan.chunk_lens[row]
        for group, window in enumerate(self.windows):
            for position in range(max(0, start - window + 1) if window else 0, end):
                held = self.cache.get((state["table"][group, position // BLOCK], position % BLOCK))
                expected = group, state["ids"][position]
                assert held == expected, f"row {row} reads {held} at {position} of {state['ids']}, group {group}"

    def _prompt_logprobs(self, plan: StepPlan, row: int) -> list[TokenLogprobs]:
        state = self.slots[plan.chunk_slots[row]]
        assert state["params"].prompt_logprobs is not None, f"row {row} takes what nobody asked for"
        start, end = plan.chunk_starts[row], plan.chunk_starts[row] + plan.chunk_lens[row]
        followed = range(start + 1, min(end, state["num_prompt"] - 1) + 1)
        assert followed, f"row {row} is followed by no prompt id"
        return [prompt_logprobs_at(state["ids"], position) for position in followed]

    @staticmethod
    def _set(state: dict, position: int, token: int) -> None:
        ids = state["ids"]
        if position < len(ids):
            assert ids[position] == token, "an id changed"
        else:
            assert position == len(ids)
            ids.append(token)


def make_request(
    request_id: str = "r",
    prompt: list[int] | int = 20,
    max_tokens: int | None = 8,
    *,
    named: bool = True,
    tenant: str = "",
    priority: int = 0,
    resume: tuple = (),
    queue_deadline: float | None = None,
    first_token_deadline: float | None = None,
    deadline: float | None = None,
    **params,
) -> Request:
    """``prompt`` as a length makes ids that no other request id shares."""
    if isinstance(prompt, int):
        base = int.from_bytes(request_id.encode()[-3:], "little") % 40000
        prompt = [(base + 13 * i) % 49000 for i in range(prompt)]
    root = hashing.root("test", "float32", salts=(tenant,)) if named else b""
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        params=SamplingParams(seed=1, max_tokens=max_tokens, **params),
        resume=resume,
        tenant=tenant,
        priority=priority,
        queue_deadline=queue_deadline,
        first_token_deadline=first_token_deadline,
        deadline=deadline,
        cache_root=root,
        block_hashes=hashing.prompt_hashes(root, prompt, BLOCK) if named else (),
    )


def make_scheduler(num_blocks: int = 64, *, free_ids=None, **config) -> Scheduler:
    defaults = {
        "block_size": BLOCK,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_waiting_requests": 0,
        "check": True,
    }
    pool = BlockPool(num_blocks, free_ids)
    return Scheduler(EngineConfig(num_blocks=num_blocks, **(defaults | config)), pool)


class Drive:
    """A scheduler and a fake executor, stepped by hand; collects what comes out and checks each stream's order."""

    def __init__(self, scheduler: Scheduler, executor: FakeExecutor | None = None):
        self.scheduler = scheduler
        self.executor = executor or FakeExecutor(
            staged=scheduler.config.num_stages > 1,
            windows=scheduler.config.windows,
            eos_ids=scheduler.config.eos_ids,
        )
        self.emitted: dict[tuple[str, int], list[int]] = {}
        self.told: dict[str, list[TokenLogprobs]] = {}  # of prompts
        self.endings: dict[tuple[str, int], TokenDelta] = {}
        self.steps = 0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request, 0.0)

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.choice)
            assert key not in self.endings, f"{key} went on after its end"
            got = self.emitted.setdefault(key, [])
            if delta.prompt_logprobs is not None:
                assert delta.choice == 0
                assert delta.prompt_logprobs, f"{key} was told nothing of its prompt"
                assert not got, f"{key} heard of its prompt after its first id"
                self.told.setdefault(delta.request_id, []).extend(delta.prompt_logprobs)
            if delta.ids:
                assert delta.offset == len(got), f"{key} jumped from {len(got)} to {delta.offset}"
            got += delta.ids
            if delta.finish_reason:
                self.endings[key] = delta

    def submit(self) -> bool:
        """Plans one more step if depth allows."""
        if self.scheduler.num_in_flight >= self.scheduler.config.depth:
            return False
        plan = self.scheduler.schedule(float(self.steps))
        if plan is None:
            return False
        self.executor.submit(plan)
        self.steps += 1
        return True

    def step(self) -> bool:
        """One turn of the engine's loop; False when nothing happened."""
        while self.submit():
            pass
        if not self.scheduler.num_in_flight:
            return False
        self.take(self.scheduler.commit(self.executor.collect(), float(self.steps)))
        return True

    def run(self, max_steps: int = 100_000) -> "Drive":
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.scheduler.num_in_flight:
                return self
            assert self.step(), "work is present, nothing can be planned"
        raise AssertionError(f"not done after {max_steps} steps")


def expected_prompt_logprobs(request: Request) -> list[TokenLogprobs]:
    return [prompt_logprobs_at(request.prompt_ids, position) for position in range(1, len(request.prompt_ids))]


def expected_ids(request: Request, choice: int = 0) -> list[int]:
    prompt = tuple(request.prompt_ids)
    assert request.params.max_tokens is not None
    return [scripted(prompt, choice, len(prompt) + i) for i in range(request.params.max_tokens)]
