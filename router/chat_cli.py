"""`paceline chat`: a conversation in the terminal. It keeps what was said and knows no HTTP beyond `client.py`."""

from typing import Any

from rich.console import Console

from paceline.proto.errors import StartupError
from paceline.router.client import Client, Refused


class Chat:
    """Lines from stdin, answers as they come to stdout; what else there is to say goes to stderr."""

    def __init__(self, client: Client, model: str | None, system: str | None, options: dict[str, Any]):
        """``options`` go into every request as they are. Raises StartupError if no server answers."""
        self._client = client
        self._options = options
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._out = Console(highlight=False, markup=False, soft_wrap=True)
        self._about = Console(stderr=True, highlight=False)
        try:
            self._model = model or client.json("/v1/models")["data"][0]["id"]
        except Refused as refused:
            raise StartupError(f"{client.url}: {refused}") from refused

    def run(self) -> None:
        self._about.print(f"{self._model} on {self._client.url}; /reset forgets, /quit ends", style="dim")
        while (line := self._read()) is not None:
            if line == "/quit":
                return
            if line == "/reset":
                self._messages = list(self._opening)
                self._about.print("forgotten", style="dim")
            elif line.startswith("/"):
                self._about.print("commands: /reset, /quit", style="dim")
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """None at the end of input and for Ctrl-C at the prompt."""
        try:
            self._about.print("> ", style="bold cyan", end="")
            return input().strip()
        except (EOFError, KeyboardInterrupt):
            self._about.print()
            return None

    def _answer(self, question: str) -> None:
        """A question that got no answer at all is taken back, so that it can be asked again."""
        messages = [*self._messages, {"role": "user", "content": question}]
        body = {"model": self._model, "messages": messages, "stream": True, **self._options}
        told: list[str] = []
        try:
            for event in self._client.events("/v1/chat/completions", body):
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        told.append(text)
                        self._out.print(text, end="")
        except KeyboardInterrupt:
            self._about.print(" (ended)", style="dim", end="")
        except (Refused, StartupError) as refused:
            self._about.print(f"{refused}", style="red", markup=False, end="")
        self._out.print()
        if told:
            self._messages = [*messages, {"role": "assistant", "content": "".join(told)}]
