"""Who may ask, and for what: API keys, known by their hashes only. Draft: replaced by its owner."""

import msgspec


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What a key stands for. ``salt`` keeps its prompts' cached blocks apart from those of others."""

    tenant: str = ""
    best_priority: int | None = None  # lowest number that it may ask for, and what it has if it asks for none; None: any
    salt: str = ""


NOBODY = Key()  # everybody, where no keys are asked for
