import asyncio
from contextlib import asynccontextmanager

import pytest
import tokenizers

from paceline.proto import hashing
from paceline.proto.errors import ContextLengthExceeded, InvalidRequest, NoReplica, ReplicaLost, SequenceFault
from paceline.router import service as service_module
from paceline.router.config import RouterConfig
from paceline.router.fields import CHAT, COMPLETIONS
from paceline.router.openai import parse
from paceline.router.pool import Pool
from paceline.router.service import Service
from tests.fakes import FakeReplica, encode, tiny_card, tiny_tokenizer_json
from tests.router.conftest import until
from tests.router.test_tokenizer import llama_card

CONFIG = RouterConfig()


@asynccontextmanager
async def serving(fake):
    async with fake:
        service = None
        pool = Pool(replicas=(fake.address,), on_card=lambda card: service.load(card))
        service = Service(pool, CONFIG)
        await pool.start()
        await asyncio.wait_for(pool.wait_ready(), 5)
        yield service
        await pool.close()


def completion(card=None, **body):
    return parse(COMPLETIONS, {"prompt": "hi"} | body, card or tiny_card(), CONFIG)


async def run(service, call):
    """Texts and reasons per choice, and usage."""
    texts, reasons = [""] * call.num_choices, [None] * call.num_choices
    async with service.open(call) as generation:
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
    monkeypatch.setattr(service_module, "ENDING_WAIT", 0.05)
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
