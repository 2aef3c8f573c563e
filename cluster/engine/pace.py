"""How many tokens of prompts a step may hold beside decodes, so that streams go on smoothly on any machine.

A token budget that fits a fast machine makes a slow one's streams wait; it follows from how long a step may take
(Agrawal et al. 2024, Sarathi-Serve, profile it offline), and here from how long steps took. Knows times that it is
told, no clock and no sequences.
"""

AIM = 0.8  # of the time between tokens: steps vary, and a token has a way to go afterwards
LEAST = 16  # prompts go on, however slow steps are
BESIDE_DECODE = 3  # tokens beside each decode in any case, or prompts fall behind where many streams make steps slow
GROWTH = 2.0  # times as many tokens as the last step had, at most


class Pace:
    """``target``: seconds between two tokens of a stream; 0 limits nothing. ``most``: the token budget of a step."""

    def __init__(self, target: float, most: int):
        self._target = target * AIM
        self._most = most
        self._num_tokens = float(most)

    def num_prefill_tokens(self, num_decode: int) -> int:
        """Beside so many decodes."""
        return min(self._most, max(int(self._num_tokens), LEAST, BESIDE_DECODE * num_decode))

    def saw(self, num_decode: int, num_prefill: int, seconds: float) -> None:
        """A step of these tokens took so long. One that took too long has told how many fit, for a step's time grows
        no faster than its tokens; one that did not has told that more fit, if it was full and had decodes in it."""
        if not self._target or not num_prefill or not seconds:
            return
        fitting = num_prefill * self._target / seconds
        if seconds > self._target:
            self._num_tokens = min(self._num_tokens, fitting)
        elif num_decode and num_prefill >= int(self._num_tokens):
            self._num_tokens = min(fitting, GROWTH * num_prefill, self._most)
