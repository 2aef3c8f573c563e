"""What llguidance is told, in one place: how it reads a vocabulary, and how much work a grammar may be.

The router and the sampling rank both ask here, so that the one refuses what the other could not run. A grammar is
llguidance's own text; what clients send, and how it becomes that, is the router's. Compiling is lazy there: a matcher is
made in a millisecond, and the limits bound every later mask, too.
"""

import llguidance

from paceline.proto.model import ModelCard

MAX_GRAMMAR_BYTES = 256 * 1024
# Fuel is work, not seconds: the same grammar is refused on every machine. About 20 ms to begin and 15 ms a mask.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=100_000, verbose_errors=False
)


def vocabulary_of(card: ModelCard) -> llguidance.LLTokenizer:
    """The card's ids and their bytes; a tenth of a second for 50,000. Raises ValueError for a tokenizer that llguidance
    cannot read."""
    return llguidance.LLTokenizer(card.tokenizer_json, n_vocab=card.vocab_size, eos_token=list(card.eos_ids))


def matcher_of(vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """At the grammar's beginning. It never raises: ask ``is_error``. Lets go of the GIL."""
    return llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
