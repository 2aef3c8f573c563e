"""What llguidance is told, in one place: how it reads a vocabulary, and how much work a grammar may be.

The router and the sampling rank both ask here, so that the one refuses what the other could not run. A grammar is
llguidance's own text; what clients send, and how it becomes that, is the router's. The limits bound every mask, too.
"""

import threading

import llguidance

from paceline.proto.model import ModelCard

MAX_GRAMMAR_BYTES = 64 * 1024
# Fuel and items are work, not seconds: the same grammar is refused on every machine. With 49,152 ids the worst masks
# that we found take 70 ms (defaults: 750 ms). 1,000 optional properties still fit.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    max_lexer_states=100_000,
    step_max_items=20_000,
    verbose_errors=False,
)
# Reading a grammar recurses in native code, a kilobyte per byte of a hostile text, and overflow ends the process.
_STACK_BYTES = 256 * 1024 * 1024
_starting = threading.Lock()  # the size of stacks is the process's


def vocabulary_of(card: ModelCard) -> llguidance.LLTokenizer:
    """The card's ids and their bytes; a tenth of a second for 50,000. Raises ValueError for a tokenizer that llguidance
    cannot read."""
    return llguidance.LLTokenizer(card.tokenizer_json, n_vocab=card.vocab_size, eos_token=list(card.eos_ids))


def matcher_of(vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """At the grammar's beginning. It never raises: ask ``is_error``. Lets go of the GIL."""
    made: list[llguidance.LLMatcher] = []
    thread = threading.Thread(
        target=lambda: made.append(llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS))
    )
    with _starting:
        threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(0)
    thread.join()
    return made[0]
