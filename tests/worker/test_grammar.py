"""What a grammar's row draws is accepted by the grammar, and by it alone: not by neighbours, batches or restarts."""

import re
from dataclasses import dataclass, field

import llguidance
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.proto.model import ModelCard
from paceline.proto.request import SamplingParams
from paceline.proto.step import TAKE_NONE, TAKE_SAMPLE, TOKEN_IN_TABLE, SlotInit, StepPlan, column
from paceline.worker.batch import build_batch
from paceline.worker.grammar import NO_VOCABULARY, NO_WAY_ON, NUM_TEMPLATES, Grammars
from paceline.worker.masks import Masks
from paceline.worker.sampler import Drawn, Sampler
from paceline.worker.table import SlotTable
from tests.models import tiny_tokenizer

VOCAB, BLOCK, EOS = 384, 16, 2
TOKENIZER = tiny_tokenizer()
CARD = ModelCard(
    name="m",
    architecture="none",
    fingerprint="none",
    max_model_len=256,
    vocab_size=VOCAB,
    kv_groups=(),
    eos_ids=(EOS,),
    tokenizer_json=TOKENIZER.to_str(),
)
GRAMMARS = {beside: Grammars(CARD, num_threads=2, beside=beside) for beside in (False, True)}


def regex(text: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(text)


@dataclass
class Text:
    """One slot's. Its logits depend on its seed and the position alone; ``urge`` is added to the end's."""

    grammar: str
    seed: int = 1
    urge: float = 0.0
    prompt: tuple[int, ...] = (7, 8, 9)
    ids: list[int] = field(default_factory=list)
    fault: str = ""
    fields: dict = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return bool(self.fault) or EOS in self.ids

    @property
    def written(self) -> str:
        return TOKENIZER.decode(self.ids[: self.ids.index(EOS)] if EOS in self.ids else self.ids)

    def logits(self, position: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + position)
        logits = 3 * torch.randn(VOCAB + 16, generator=generator)  # with an embedding's padding
        logits[EOS] += self.urge
        return logits


class Desk:
    """A slot table, grammars and a sampler, without a model: texts get random logits."""

    def __init__(self, beside: bool = False, card: ModelCard = CARD):
        self.table = SlotTable(8, CARD.max_model_len, BLOCK)
        self.grammars = GRAMMARS[beside] if card is CARD else Grammars(card, num_threads=1, beside=beside)
        self.sampler = Sampler(VOCAB, CARD.eos_ids)
        self.seated: dict[int, tuple[Text, int]] = {}  # slot -> text, epoch
        self.epoch = 0

    def seat(self, slot: int, text: Text) -> None:
        """With all the ids that it has, as after a preemption."""
        self.epoch += 1
        self.seated[slot] = text, self.epoch
        params = SamplingParams(**({"seed": text.seed, "grammar": text.grammar} | text.fields))
        init = SlotInit(
            slot=slot,
            epoch=self.epoch,
            token_ids=column([*text.prompt, *text.ids]),
            num_prompt=len(text.prompt),
            choice=0,
            params=params,
        )
        self._apply(StepPlan(step_id=self.epoch, admissions=[init]))

    def leave(self, slot: int) -> None:
        del self.seated[slot]
        self._apply(StepPlan(step_id=self.epoch, releases=column([slot])))

    def step(self, *slots: int) -> Drawn:
        """A draw for each of ``slots``; ids that they drew before are read from the table."""
        texts = [self.seated[slot][0] for slot in slots]
        lengths = [len(text.prompt) + len(text.ids) for text in texts]
        plan = StepPlan(
            step_id=self.epoch,
            chunk_slots=column(slots),
            chunk_epochs=column(self.seated[slot][1] for slot in slots),
            chunk_starts=column(length - 1 for length in lengths),
            chunk_lens=column([1] * len(slots)),
            chunk_tokens=column([TOKEN_IN_TABLE] * len(slots)),
            chunk_takes=column([TAKE_SAMPLE] * len(slots)),
            chunk_writes=column([1] * len(slots)),
            num_drafts=column([0] * len(slots)),
        )
        batch = build_batch(plan, self.table, BLOCK)
        masks_of = self.grammars.start(batch)
        rows = batch.order[batch.samples].tolist()
        logits = torch.stack([texts[row].logits(lengths[row]) for row in rows])
        masks = masks_of()
        where = batch.slots[batch.samples], batch.context_lens[batch.samples]
        drawn = self.sampler(logits, *where, self.table, masks)
        self.table.write_ids(*where, drawn.ids)
        for draw, (row, token) in enumerate(zip(rows, drawn.ids.tolist(), strict=True)):
            if masks is not None and draw in masks.faults:
                texts[row].fault = masks.faults[draw]
            else:
                texts[row].ids.append(token)
        return drawn

    def write(self, *slots: int, num_ids: int = 30) -> None:
        """Until all are done, or have so many ids."""
        while going := [
            slot for slot in slots if not (text := self.seated[slot][0]).is_done and len(text.ids) < num_ids
        ]:
            self.step(*going)

    def _apply(self, plan: StepPlan) -> None:
        self.table.apply(plan)
        self.grammars.apply(plan)


def written_alone(text: Text, beside: bool = False, **write) -> Text:
    desk = Desk(beside)
    desk.seat(0, text)
    desk.write(0, **write)
    desk.leave(0)
    return text


letters = st.sampled_from(["a", "b", "c", "[a-z]", "[0-9]", " ", "한", "é", "the "])
regexes = st.recursive(
    letters,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{1,3}", "{2}"])).map(lambda two: f"({two[0]}){two[1]}"),
    ),
    max_leaves=8,
).filter(lambda text: not re.fullmatch(text, ""))


@settings(max_examples=60, deadline=None)
@given(text=regexes, seed=st.integers(0, 10**6), greedy=st.booleans(), urge=st.sampled_from([0.0, 6.0, 30.0]))
def test_every_finished_text_is_one_of_the_grammars(text, seed, greedy, urge):
    fields = {"temperature": 0.0} if greedy else {"top_p": 0.9, "top_k": 20, "frequency_penalty": 0.5}
    own = written_alone(Text(regex(text), seed, urge, fields=fields), num_ids=80)
    assert not own.fault
    if own.is_done:
        assert re.fullmatch(text, own.written), own.written


@settings(max_examples=20, deadline=None)
@given(
    texts=st.lists(st.one_of(st.just(""), regexes.map(regex)), min_size=2, max_size=6),
    seed=st.integers(0, 10**6),
    beside=st.booleans(),
)
def test_texts_of_different_grammars_do_not_mix(texts, seed, beside):
    alone = [written_alone(Text(text, seed + i), num_ids=12).ids for i, text in enumerate(texts)]
    desk = Desk(beside)
    together = [Text(text, seed + i) for i, text in enumerate(texts)]
    for slot, text in enumerate(together):
        desk.seat(slot, text)
    desk.write(*range(len(texts)), num_ids=12)
    for slot in range(len(texts)):
        desk.leave(slot)
    assert [text.ids for text in together] == alone


@settings(max_examples=20, deadline=None)
@given(text=regexes, seed=st.integers(0, 10**6), cut=st.integers(0, 12), slot=st.integers(0, 7))
def test_one_that_was_preempted_goes_on_where_it_was(text, seed, cut, slot):
    whole = written_alone(Text(regex(text), seed), num_ids=16)
    again = Text(regex(text), seed)
    desk = Desk()
    desk.seat(2, again)
    desk.write(2, num_ids=cut)
    desk.leave(2)
    if not again.is_done:
        desk.seat(slot, again)
        desk.write(slot, num_ids=16)
        desk.leave(slot)
    assert again.ids == whole.ids


def test_a_slots_next_text_has_its_own_grammar_or_none():
    desk = Desk()
    desk.seat(0, Text(regex("a+")))
    desk.write(0, num_ids=3)
    free, other = Text(""), Text(regex("b+"))
    desk.seat(0, free)
    desk.write(0, num_ids=3)
    assert not set(free.written) <= {"a"}
    desk.seat(0, other)
    desk.write(0, num_ids=3)
    assert set(other.written) == {"b"}
    desk.leave(0)


@pytest.mark.parametrize("beside", [False, True])
def test_a_step_behind_the_end_is_no_fault(beside):
    """With two plans in flight a sequence that drew its end is in one more."""
    desk, text = Desk(beside), Text(regex("ab"))
    desk.seat(0, text)
    desk.write(0)
    assert text.ids[-1] == EOS
    desk.step(0)
    desk.step(0)
    assert not text.fault
    desk.leave(0)


@pytest.mark.parametrize("broken", ['{"nonsense": 1}', "start: /(/", regex("a+")])
def test_a_fault_ends_its_row_alone(broken):
    """One whose grammar is none, and one that was handed ids which its grammar does not take."""
    neighbours = [Text(regex("[0-9]+"), 4), Text("", 5)]
    alone = [written_alone(Text(text.grammar, text.seed), num_ids=5).ids for text in neighbours]
    desk, bad = Desk(), Text(broken, ids=TOKENIZER.encode("zz").ids)
    for slot, text in enumerate((neighbours[0], bad, neighbours[1])):
        desk.seat(slot, text)
    for _ in range(5):
        desk.step(0, 1, 2)
    for slot in range(3):
        desk.leave(slot)
    assert bad.fault == NO_WAY_ON
    assert [text.ids for text in neighbours] == alone


def test_without_a_vocabulary_only_grammars_fault(caplog):
    card = ModelCard(**{name: getattr(CARD, name) for name in ModelCard.__struct_fields__} | {"tokenizer_json": "{}"})
    desk, text, free = Desk(card=card), Text(regex("a")), Text("")
    assert "no grammars with this model's tokenizer" in caplog.text
    desk.seat(0, text)
    desk.seat(1, free)
    desk.step(0, 1)
    assert text.fault == NO_VOCABULARY
    assert len(free.ids) == 1


def test_old_grammars_are_forgotten_and_made_anew():
    for i in range(NUM_TEMPLATES + 2):
        written_alone(Text(regex(f"x{i}y")), num_ids=1)
    assert len(GRAMMARS[False]._templates) == NUM_TEMPLATES
    assert written_alone(Text(regex("x0y"))).written == "x0y"


def test_a_step_without_grammars_has_no_masks():
    desk = Desk()
    desk.seat(0, Text(""))
    assert desk.step(0).ids.shape == (1,)
    assert GRAMMARS[False]._texts == {}


# -- beside other parameters -------------------------------------------------------------------------------------------


def test_min_tokens_holds_the_end_back_while_the_grammar_leaves_something_else():
    short = written_alone(Text(regex("a+"), urge=50.0))
    assert len(short.ids) == 2
    held = written_alone(Text(regex("a+"), urge=50.0, fields={"min_tokens": 5}))
    assert len(held.ids) == 6


def test_where_the_grammar_has_come_to_its_end_min_tokens_does_not_count():
    text = written_alone(Text(regex("cat"), fields={"min_tokens": 20, "stop_ids": (5, VOCAB + 5)}))
    assert text.written == "cat"
    assert not text.fault


def test_bias_and_filters_choose_among_what_is_allowed():
    wrong = TOKENIZER.encode("z").ids[0]
    for fields in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"top_k": 300, "top_p": 0.99}):
        text = Text(regex("[0-9]{4}"), fields=fields | {"logit_bias": {wrong: 100.0}})
        assert re.fullmatch("[0-9]{4}", written_alone(text).written)


def test_logprobs_are_those_of_the_logits_before_the_mask():
    desk, text = Desk(), Text(regex("[0-9]+"), fields={"logprobs": 4})
    desk.seat(0, text)
    raw = text.logits(len(text.prompt))[:VOCAB].log_softmax(-1)
    [token] = desk.step(0).logprobs.by_row()[0]
    desk.leave(0)
    assert token.top_ids == raw.topk(4).indices.tolist()
    assert token.logprob == pytest.approx(float(raw[text.ids[0]]), abs=1e-5)


# -- masks -------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 69), max_size=70), st.sets(st.integers(0, 69), max_size=20), st.booleans())
def test_bits_allow_what_they_say(allowed, ends, all_rows):
    masks = Masks.open([1] if not all_rows else [0, 1], 70, pinned=False)
    bits = masks.bits.numpy().view("u4")
    bits[-1] = 0
    for i in allowed:
        bits[-1, i // 32] |= 1 << (i % 32)
    logits = torch.randn(2, 70)
    before = logits.clone()
    told = masks.applied(logits)
    assert set(torch.isfinite(told[1]).nonzero().flatten().tolist()) == allowed
    assert torch.equal(told[0], before[0])
    assert torch.equal(logits, before)
    assert masks.leaves(1, sorted(ends)) == bool(allowed - ends)
    assert masks.leaves(0, sorted(ends))


def test_takes_that_are_nothing_leave_the_matcher_alone():
    """A chunk of the prompt that draws nothing comes before the first draw."""
    desk, text = Desk(), Text(regex("[0-9]{2}"))
    desk.seat(0, text)
    plan = StepPlan(
        step_id=1,
        chunk_slots=column([0]),
        chunk_epochs=column([desk.epoch]),
        chunk_starts=column([0]),
        chunk_lens=column([2]),
        chunk_tokens=column([TOKEN_IN_TABLE]),
        chunk_takes=column([TAKE_NONE]),
        chunk_writes=column([1]),
        num_drafts=column([0]),
    )
    assert desk.grammars.start(build_batch(plan, desk.table, BLOCK))() is None
    desk.write(0)
    desk.leave(0)
    assert re.fullmatch("[0-9]{2}", text.written)
