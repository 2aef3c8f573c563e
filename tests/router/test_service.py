import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import tokenizers

from paceline.proto import hashing
from paceline.proto.errors import (
    BY_CODE,
    ContextLengthExceeded,
    FirstTokenTimeout,
    InvalidRequest,
    NoReplica,
    Overloaded,
    QueueTimeout,
    ReplicaLost,
    RequestTimeout,
    SequenceFault,
)
from paceline.router import generation as generation_module
from paceline.router import service as service_module
from paceline.router.config import RouterConfig
from paceline.router.fields import CHAT, COMPLETIONS
from paceline.router.keys import Key
from paceline.router.limits import Deadlines
from paceline.router.openai import parse
from paceline.router.pool import Pool
from paceline.router.service import Service
from tests.fakes import FakeReplica, encode, tiny_card, tiny_tokenizer_json
from tests.router.conftest import until
from tests.router.test_tokenizer import llama_card

CONFIG = RouterConfig()


@asynccontextmanager
async def serving(*fakes, config=CONFIG, **hooks):
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        service = None
        pool = Pool(replicas=tuple(fake.address for fake in fakes), on_card=lambda card: service.load(card))
        service = Service(pool, config, **hooks)
        await pool.start()
        await until(lambda: len(pool.usable) == len(fakes))
        yield service
        await pool.close()


def completion(card=None, **body):
    return parse(COMPLETIONS, {"prompt": "hi"} | body, card or tiny_card(), CONFIG)


async def run(service, call, deadlines=None):
    """Texts and reasons per choice, and usage."""
    texts, reasons = [""] * call.num_choices, [None] * call.num_choices
    async with service.open(call, deadlines) as generation:
        async for batch in generation.deltas():
            assert batch
            for delta in batch:
                assert reasons[delta.index] is None, "nothing may follow a finish reason"
                texts[delta.index] += delta.text
                reasons[delta.index] = delta.finish_reason
        return texts, reasons, await generation.usage()


async def test_a_prompt_goes_down_as_ids_with_hashes_and_comes_back_as_text():
    async with serving(fake := FakeReplica(text="Hello 🙂 world.", num_cached=16)) as service:
        prompt = "the quick brown fox jumps over the lazy dog. " * 3
        texts, reasons, usage = await run(service, completion(prompt=prompt, temperature=0.5))
        assert (texts, reasons) == (["Hello 🙂 world."], ["stop"])
        [sent] = fake.submissions
        card = tiny_card()
        assert sent.prompt_ids == encode(prompt)
        assert sent.block_hashes == hashing.prompt_hashes(hashing.root_of(card), sent.prompt_ids, 16)
        assert len(sent.block_hashes) > 0
        assert sent.cache_root == hashing.root_of(card)
        assert sent.params.temperature == 0.5
        generated = len(encode("Hello 🙂 world.")) + 1
        assert (usage.num_prompt, usage.num_cached, usage.num_generated) == (len(sent.prompt_ids), 16, generated)


async def test_prompts_times_n_choices_are_numbered_prompt_first_and_run_together():
    def script(request, choice):
        return [request.prompt_ids[0] + choice, 2]

    a, b, c = (encode(letter)[0] for letter in "abc")
    async with serving(fake := FakeReplica(script=script, hold=True)) as service:
        running = asyncio.create_task(run(service, completion(prompt=[[a], [b], [c]], n=2)))
        await until(lambda: len(fake.submissions) == 3)
        fake.release()
        texts, reasons, usage = await running
        table = service.model.tokenizer.text_bytes
        assert texts == [table[id + choice].decode() for id in (a, b, c) for choice in (0, 1)]
        assert reasons == ["stop"] * 6
        assert (usage.num_prompt, usage.num_generated) == (3, 12)
        assert [request.params.n for request in fake.submissions] == [2, 2, 2]


@pytest.mark.parametrize("per_frame", [1, 3, 50])
async def test_a_stop_string_ends_the_choice_here_and_finishes_it_there(per_frame):
    text = "one two three four five six seven"
    ids = encode(text)
    tokenizer = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    num_used = next(k for k in range(len(ids)) if "ree f" in tokenizer.decode(ids[:k]))
    async with serving(fake := FakeReplica(text=text, per_frame=per_frame, delay=0.002, num_cached=7)) as service:
        texts, reasons, usage = await run(service, completion(stop=["ree f", "zzz"], ignore_eos=True))
        assert (texts, reasons) == (["one two th"], ["stop"])
        assert usage.num_generated == num_used
        assert usage.num_cached == 7
        assert [(choice, num) for _, choice, num in fake.finishes] == [(0, num_used)]
        assert fake.running == {}
        assert fake.cancels == []


async def test_one_choice_may_stop_while_the_others_go_on():
    def script(request, choice):
        return [*encode("ab stop here" if choice == 1 else "nothing of the kind"), 2]

    async with serving(FakeReplica(script=script, delay=0.001)) as service:
        texts, reasons, _ = await run(service, completion(n=3, stop="stop"))
        assert texts == ["nothing of the kind", "ab ", "nothing of the kind"]
        assert reasons == ["stop"] * 3


async def test_usage_does_not_wait_for_ever_for_an_ending(monkeypatch):
    monkeypatch.setattr(generation_module, "ENDING_WAIT", 0.05)
    fake = FakeReplica(text="one two three", delay=0.002)

    async def deaf(*_):
        pass

    fake._finish = deaf
    async with serving(fake) as service:
        _, _, usage = await run(service, completion(prompt=[5], stop="two", ignore_eos=True))
        assert usage.num_prompt == 1
        await until(lambda: fake.cancels)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "numbers"),
    [(256, 1, (256, 256)), (257, None, (257, 256)), (200, 57, (200, 57, 256)), (8, 10**9, (8, 10**9, 256))],
)
async def test_what_does_not_fit_the_context_is_refused_with_the_numbers(num_prompt, max_tokens, numbers):
    async with serving(fake := FakeReplica()) as service:
        with pytest.raises(ContextLengthExceeded) as caught:
            await run(service, completion(prompt=[5] * num_prompt, max_tokens=max_tokens))
        assert all(str(number) in caught.value.message for number in numbers)
        assert fake.submissions == []


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(255, 1), (255, None), (200, 56)])
async def test_what_just_fits_is_served_and_an_open_limit_stays_open(num_prompt, max_tokens):
    async with serving(fake := FakeReplica()) as service:
        await run(service, completion(prompt=[5] * num_prompt, max_tokens=max_tokens))
        assert fake.submissions[0].params.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("num_prompt", "more", "param", "numbers"),
    [
        (256, {"min_tokens": 1}, "prompt", (256,)),
        (250, {"min_tokens": 7}, "min_tokens", (250, 7, 256)),
        (257, {"max_tokens": 0, "echo": True}, "prompt", (257, 256)),
    ],
)
async def test_the_least_that_is_asked_for_must_fit_too(num_prompt, more, param, numbers):
    async with serving(fake := FakeReplica()) as service:
        with pytest.raises(ContextLengthExceeded) as caught:
            await run(service, completion(prompt=[5] * num_prompt, **more))
        assert caught.value.param == param
        assert all(str(number) in caught.value.message for number in numbers)
        assert fake.submissions == []


async def test_a_prompt_alone_may_fill_the_context():
    async with serving(FakeReplica()) as service:
        for num_prompt in (1, 256):
            await service.render(completion(prompt=[5] * num_prompt, max_tokens=0, echo=True))


IDS = list(range(5, 255))


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({"truncate_prompt_tokens": 10}, IDS[-10:]),
        ({"truncate_prompt_tokens": 1}, IDS[-1:]),
        ({"truncate_prompt_tokens": 250}, IDS),
        ({"truncate_prompt_tokens": 10**9}, IDS),
        ({"truncate_prompt_tokens": -1}, IDS),
        ({"truncate_prompt_tokens": -1, "max_tokens": 56}, IDS[-200:]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 255}, IDS[-1:]),
        ({"truncate_prompt_tokens": 10, "prompt": [0, *IDS]}, [0, *IDS[-9:]]),
        ({"truncate_prompt_tokens": 1, "prompt": [0, *IDS]}, [0]),
        ({"truncate_prompt_tokens": -1, "prompt": IDS * 2}, (IDS * 2)[-255:]),
    ],
)
async def test_a_prompt_is_cut_only_as_it_is_asked_to_be(body, want):
    async with serving(fake := FakeReplica()) as service:
        await run(service, completion(**{"prompt": IDS} | body))
        assert fake.submissions[0].prompt_ids == want


@pytest.mark.parametrize(
    "body", [{"truncate_prompt_tokens": -1, "max_tokens": 256}, {"truncate_prompt_tokens": 200, "max_tokens": 57}]
)
async def test_a_cut_that_leaves_no_room_is_refused_with_the_numbers(body):
    async with serving(FakeReplica()) as service:
        with pytest.raises(ContextLengthExceeded) as caught:
            await run(service, completion(prompt=IDS, **body))
        assert caught.value.param == "max_tokens"
        assert str(body["max_tokens"]) in caught.value.message


async def test_cached_blocks_are_shared_where_model_key_and_salt_are_equal():
    card = tiny_card()
    asked = [
        completion(prompt=[5] * 40),
        completion(prompt=[5] * 40),
        completion(prompt=[5] * 40, cache_salt="a"),
        parse(COMPLETIONS, {"prompt": [5] * 40}, card, CONFIG, Key(tenant="t", salt="a")),
        parse(COMPLETIONS, {"prompt": [5] * 40, "cache_salt": "a"}, card, CONFIG, Key(tenant="t", salt="a")),
    ]
    async with serving(fake := FakeReplica()) as service:
        for call in asked:
            await run(service, call)
        first, again, *others = fake.submissions
        assert (first.cache_root, first.block_hashes) == (again.cache_root, again.block_hashes)
        roots = [request.cache_root for request in fake.submissions[1:]]
        assert len(set(roots)) == len(roots)
        assert all(
            request.block_hashes == hashing.prompt_hashes(request.cache_root, [5] * 40, 16) for request in others
        )
        assert [request.tenant for request in fake.submissions] == ["", "", "", "t", "t"]


async def test_a_prompt_may_go_without_the_token_that_begins_texts():
    card = tiny_card(add_bos=True)
    async with serving(fake := FakeReplica(card=card)) as service:
        await run(service, completion(card, prompt="hi", truncate_prompt_tokens=1))
        await run(service, completion(card, prompt="hi", add_special_tokens=False))
        assert [request.prompt_ids for request in fake.submissions] == [[0], encode("hi")]


async def test_what_is_rendered_is_what_is_computed():
    talk = [{"role": "user", "content": "hi <|im_end|>"}, {"role": "assistant", "content": "The capital is"}]
    going_on = {"messages": talk, "continue_final_message": True}
    async with serving(fake := FakeReplica()) as service:
        for call, text in (
            (completion(prompt="hello"), "hello"),
            (completion(prompt=encode("hello <|im_end|>")), "hello <|im_end|>"),
            (parse(CHAT, going_on, tiny_card(), CONFIG), None),
            (parse(CHAT, going_on | {"truncate_prompt_tokens": 5}, tiny_card(), CONFIG), None),
        ):
            shown, ids = await service.render(call)
            await run(service, call)
            assert fake.submissions[-1].prompt_ids == ids
            assert shown == (text or service.model.tokenizer.decode(ids))


async def test_structure_is_compiled_before_anything_is_tokenized(monkeypatch):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with serving(fake := FakeReplica()) as service:
        await run(service, completion(guided_json=schema, n=2))
        [sent] = fake.submissions
        assert sent.params.grammar
        assert sent.params.grammar == await service.model.structures.compile(completion(guided_json=schema).structure)
        monkeypatch.setattr(service.model, "encode", None)  # whoever calls it fails
        for body in ({"guided_regex": "(a"}, {"guided_json": {"type": "nope"}}):
            with pytest.raises(InvalidRequest) as caught:
                await run(service, completion(**body))
            assert caught.value.param in body
            with pytest.raises(InvalidRequest):
                await service.render(completion(**body))


async def test_an_empty_prompt_is_refused():
    async with serving(FakeReplica()) as service:
        with pytest.raises(InvalidRequest, match="no tokens"):
            await run(service, completion(prompt=""))


async def test_leaving_early_aborts_every_prompt():
    async with serving(fake := FakeReplica(delay=0.005)) as service:
        async with service.open(completion(prompt=["a", "b"], n=2, ignore_eos=True)) as generation:
            async for _ in generation.deltas():
                break
        await until(lambda: len(fake.cancels) == 2)
        assert fake.running == {}


async def test_cancellation_while_waiting_to_be_accepted_aborts():
    async with serving(fake := FakeReplica(hold=True)) as service:
        running = asyncio.create_task(run(service, completion()))
        await until(lambda: fake.submissions)
        running.cancel()
        await until(lambda: fake.cancels)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"die_at": 3}, ReplicaLost), ({"fail_at": 3}, SequenceFault), ({"skip_at": 3}, ReplicaLost)],
)
async def test_a_failure_comes_after_what_was_said_before_it(options, error):
    async with serving(FakeReplica(text="one two three four", delay=0.005, **options)) as service:
        said = []

        async def listen():
            async with service.open(completion()) as generation:
                async for batch in generation.deltas():
                    said.extend(delta.text for delta in batch)

        with pytest.raises(error):
            await listen()
        assert "".join(said)
        assert "one two three four".startswith("".join(said))


async def test_ids_that_come_again_are_not_told_again():
    async with serving(FakeReplica(text="one two three four", duplicate_at=3)) as service:
        texts, _, usage = await run(service, completion(logprobs=0))
        assert texts == ["one two three four"]
        assert usage.num_generated == len(encode("one two three four")) + 1


async def test_logprobs_come_one_for_each_id_that_counts():
    async with serving(FakeReplica(text="one two three four")) as service:
        for stop in ([], ["ree"]):
            num = 0
            async with service.open(completion(logprobs=1, stop=stop)) as generation:
                async for batch in generation.deltas():
                    for delta in batch:
                        assert len(delta.logprobs) == len(delta.ids)
                        num += len(delta.ids)
                assert num == (await generation.usage()).num_generated


async def test_a_chat_reply_loses_the_space_that_a_completion_keeps():
    card = llama_card(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    hello = tokenizers.Tokenizer.from_str(card.tokenizer_json).encode("hello").ids
    async with serving(FakeReplica(card=card, script=lambda *_: [*hello, 2])) as service:
        chat = parse(CHAT, {"messages": [{"role": "user", "content": "he"}]}, card, CONFIG)
        assert (await run(service, chat))[0] == ["hello"]
        assert (await run(service, completion(card, prompt="he")))[0] == [" hello"]
        assert (await run(service, completion(card, prompt="")))[0] == ["hello"]


async def test_without_a_template_chat_is_refused():
    card = tiny_card(chat_template=None)
    async with serving(FakeReplica(card=card)) as service:
        with pytest.raises(InvalidRequest, match="no chat template"):
            await run(service, parse(CHAT, {"messages": [{"role": "user", "content": "x"}]}, card, CONFIG))


async def test_before_any_replica_there_is_no_model():
    with pytest.raises(NoReplica):
        _ = Service(Pool(), CONFIG).model


# -- the gate, the clock, and a replica that is lost -------------------------------------------------------------------


async def test_who_is_refused_is_refused_before_anything_is_tokenized(monkeypatch):
    shed = []
    fake = FakeReplica(stall_at=0, max_num_seqs=2, max_waiting_requests=4)
    async with serving(fake, on_shed=shed.append) as service:
        calls = [asyncio.create_task(run(service, completion())) for _ in range(4)]
        await until(lambda: len(fake.submissions) == 4)
        monkeypatch.setattr(service_module, "_requests", None)  # whoever calls it fails
        for call in (completion(n=3), completion(prompt=["a", "b", "c"])):
            with pytest.raises(Overloaded) as caught:
                await run(service, call)
            assert caught.value.retry_after >= 1
        assert shed == ["overloaded"] * 2
        monkeypatch.undo()
        calls.append(asyncio.create_task(run(service, completion(n=2))))
        await until(lambda: len(fake.submissions) == 5)
        assert service.gate.num_open == 6
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert service.gate.num_open == 0


async def test_deadlines_go_down_with_the_request():
    async with serving(fake := FakeReplica(), config=RouterConfig(queue_timeout=5)) as service:
        before = time.time()
        await run(service, completion())
        [sent] = fake.submissions
        assert before + 5 <= sent.queue_deadline <= time.time() + 5
        assert sent.first_token_deadline is None
        assert before + 1800 <= sent.deadline <= time.time() + 1800
        async with service.open(completion(), Deadlines(first_token=7e9)):
            pass
        sent = fake.submissions[-1]
        assert (sent.queue_deadline, sent.first_token_deadline, sent.deadline) == (None, 7e9, None)


@pytest.mark.parametrize(
    ("options", "deadlines", "leaf"),
    [
        ({"hold": True}, {"queue": 0.2, "end": 0.5}, QueueTimeout),
        ({"hold": True}, {"first_token": 0.2}, FirstTokenTimeout),
        ({"stall_at": 2}, {"queue": 0.1, "end": 0.2}, RequestTimeout),
    ],
)
async def test_a_replica_that_does_not_keep_the_times_does_not_hold_the_client(options, deadlines, leaf, monkeypatch):
    monkeypatch.setattr(service_module, "END_SLACK", 0.1)
    async with serving(fake := FakeReplica(**options)) as service:
        times = Deadlines(**{name: time.time() + seconds for name, seconds in deadlines.items()})
        with pytest.raises(leaf):
            await run(service, completion(), times)
        await until(lambda: fake.cancels)
        assert service.gate.num_open == 0


@pytest.mark.parametrize("options", [{"die_at": 0}, {"reject": Overloaded("full")}, {"reject": NoReplica("draining")}])
async def test_a_prompt_of_which_nothing_came_moves_to_another_replica(options):
    moved = []
    bad, good = FakeReplica(replica_id="a", **options), FakeReplica(replica_id="b")
    async with serving(bad, good, on_move=moved.append) as service:
        texts, reasons, _ = await run(service, completion(n=2))
        assert (texts, reasons) == (["Hello world."] * 2, ["stop"] * 2)
        assert (len(bad.submissions), len(good.submissions)) == (1, 1)
        assert good.submissions[0].attempt == ("die_at" in options)
        assert good.submissions[0].params.seed == bad.submissions[0].params.seed
        assert moved == [1]


async def test_an_engine_that_dies_tells_so_and_its_prompts_move():
    bad, good = FakeReplica(replica_id="a", fail_at=0, fail_code="replica_lost"), FakeReplica(replica_id="b")
    async with serving(bad, good) as service:
        assert (await run(service, completion(n=3)))[0] == ["Hello world."] * 3


async def test_what_has_begun_does_not_move_and_a_prompt_that_loses_replicas_moves_once():
    begun, spare = FakeReplica(replica_id="a", die_at=2), FakeReplica(replica_id="b")
    async with serving(begun, spare) as service:
        with pytest.raises(ReplicaLost):
            await run(service, completion())
        assert spare.submissions == []
    deadly = [FakeReplica(replica_id=name, die_at=0) for name in "abc"]
    async with serving(*deadly) as service:
        with pytest.raises(ReplicaLost):
            await run(service, completion())
        assert sum(len(fake.submissions) for fake in deadly) == 2


async def test_refusals_are_tried_everywhere_and_the_last_word_is_theirs():
    full = [FakeReplica(replica_id=name, reject=Overloaded("full", retry_after=3)) for name in "abc"]
    async with serving(*full) as service:
        with pytest.raises(Overloaded):
            await run(service, completion())
        assert [len(fake.submissions) for fake in full] == [1, 1, 1]


@pytest.mark.parametrize("code", ["queue_timeout", "first_token_timeout", "request_timeout", "sequence_fault", None])
async def test_an_ending_carries_its_leaf(code):
    async with serving(FakeReplica(fail_at=0, fail_code=code)) as service:
        with pytest.raises(BY_CODE[code or "sequence_fault"]):
            await run(service, completion())
