"""The grammars of the slots that have one: which ids each draw of a step may give. Knows matchers, not logits.

A matcher is made of the ids that an admission brings and follows those that are drawn, so that preemption, failover
and forks need nothing of their own. Behind its end it allows the end token alone, and takes it again: a plan that was
under way when the end was drawn is no fault.

    start     the ids that this step's draws follow are copied to the host
    forward   on a GPU a side thread takes them in and fills the masks meanwhile; it knows no torch but the copy's event
    masks     the sampler waits for them, last of all
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import llguidance
import numpy as np
import torch

from paceline.proto.grammar import matcher_of, vocabulary_of
from paceline.proto.model import ModelCard
from paceline.proto.step import StepPlan
from paceline.worker.batch import Batch
from paceline.worker.masks import Masks
from paceline.worker.pinned import enqueued_event, pinned_copy

NUM_TEMPLATES = 64  # grammars that are kept compiled: a matcher takes milliseconds to make, and microseconds to copy
NO_WAY_ON = "the grammar cannot be followed any further: no id of the vocabulary fits, or to find one is too much work"
NO_VOCABULARY = "grammars cannot be used with this model's tokenizer"

log = logging.getLogger("paceline.worker")


@dataclass(slots=True)
class _Text:
    """What a slot has written. ``num_told`` ids, the prompt's included, came with the admission."""

    grammar: str
    unread: list[int]  # ids that the matcher has not seen
    num_told: int
    matcher: llguidance.LLMatcher | None = None


class Grammars:
    """Of the rank that samples. ``num_threads`` fill masks together; ``beside``: beside the forward, not behind it."""

    def __init__(self, card: ModelCard, num_threads: int, beside: bool):
        self._vocab_size = card.vocab_size
        # At the start, though few may ask for it: it keeps the GIL for 0.15 s with 49,152 ids, so that steps would
        # stall in a side thread's time, too.
        self._vocabulary = _vocabulary(card)
        self._executor = llguidance.LLExecutor(num_threads)
        self._thread = ThreadPoolExecutor(1, "grammar") if beside else None
        self._templates: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._texts: dict[int, _Text] = {}  # by slot

    def apply(self, plan: StepPlan) -> None:
        """Releases and admissions, in that order (the ordering law)."""
        for slot in plan.releases if self._texts else ():
            self._texts.pop(slot, None)
        for init in plan.admissions:
            self._texts.pop(init.slot, None)
            if init.params.grammar:
                emitted = init.token_ids[init.num_prompt :].tolist()
                self._texts[init.slot] = _Text(init.params.grammar, emitted, len(init.token_ids))

    def start(self, batch: Batch) -> Callable[[], Masks | None]:
        """Before the forward. What it returns gives the masks of the batch's draws; None where none has a grammar."""
        slots = batch.slots[batch.samples].tolist() if self._texts else ()
        draws = [draw for draw, slot in enumerate(slots) if slot in self._texts]
        if not draws:
            return lambda: None
        texts = [self._texts[slots[draw]] for draw in draws]
        positions = batch.context_lens[batch.samples[draws]].tolist()
        last_ids = pinned_copy(batch.ids[batch.last_tokens]).numpy()
        masks = Masks.open(draws, self._vocab_size, pinned=batch.ids.is_cuda)
        fill = partial(self._fill, masks, masks.bits.numpy(), texts, positions, last_ids, enqueued_event(batch.ids))
        # On a CPU there is no core to spare: masks of 16 rows of JSON take 0.5 ms, and steps of 42 ms came out as long
        # with a side thread as without. It does without, for nothing then competes with the forward.
        return fill if self._thread is None else self._thread.submit(fill).result

    def _fill(
        self,
        masks: Masks,
        bits: np.ndarray,
        texts: list[_Text],
        positions: list[int],
        last_ids: np.ndarray,
        event: torch.cuda.Event | None,
    ) -> Masks:
        """``bits`` are the masks' own, as numpy has them. last_ids: [draws], the id at position - 1 of each."""
        if self._vocabulary is None:
            masks.faults.update(dict.fromkeys(masks.draws, NO_VOCABULARY))
            return masks
        if event is not None:
            event.synchronize()
        matchers = []
        for row, (draw, text, position) in enumerate(zip(masks.draws, texts, positions, strict=True)):
            if position > text.num_told:
                text.unread.append(int(last_ids[draw]))
            if text.matcher is None:
                text.matcher = self._beginning(self._vocabulary, text.grammar)
            for token in text.unread:  # all at once they are refused behind the end
                text.matcher.consume_token(token)
            text.unread.clear()
            matchers.append((text.matcher, row))
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))
        for matcher, row in matchers:
            if matcher.is_error():
                bits[row] = -1
                masks.faults[masks.draws[row]] = NO_WAY_ON
        return masks

    def _beginning(self, vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
        """A matcher that has seen nothing."""
        template = self._templates.pop(grammar, None)
        if template is None:
            template = matcher_of(vocabulary, grammar)
            template.compute_bitmask()  # what this finds out is copied, too
        self._templates[grammar] = template
        if len(self._templates) > NUM_TEMPLATES:
            self._templates.popitem(last=False)
        return template.deep_copy()


def _vocabulary(card: ModelCard) -> llguidance.LLTokenizer | None:
    try:
        return vocabulary_of(card)
    except ValueError as error:
        log.warning("no grammars with this model's tokenizer: %s", error)
        return None
