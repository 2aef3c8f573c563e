"""What an API key stands for, and the file in which keys are written down. Pure: nobody reads a file or a clock here.

Only the hash of a key is ever kept: a lookup of it tells nothing of the key by the time that it takes. Messages name
lines and fields of the file, never what stands in them: somebody may have pasted a key in the wrong place.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import yaml

from paceline.proto.errors import StartupError

MAX_TEXT_LEN = 128  # characters of a tenant or of a cache salt
MAX_PRIORITY = 2**31 - 1  # either way: what travels to a replica

_HASH = re.compile(r"[0-9a-f]{64}")
_INTEGER = re.compile(r"-?[0-9]{1,10}")


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What a key stands for. ``best_priority`` is the lowest number that it may ask for (None: any), ``salt`` keeps its
    prompts' cached blocks apart from those of others."""

    tenant: str = ""
    best_priority: int | None = None
    salt: str = ""


NOBODY = Key()  # everybody, where no keys are asked for


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def fresh() -> str:
    return "pl-" + secrets.token_urlsafe(32)


def entry_of(key: str, tenant: str, priority: int | None = None, cache_salt: str | None = None) -> str:
    """The lines of a key file that let the key in."""
    entry = {"sha256": hash_of(key), "tenant": tenant, "priority": priority, "cache_salt": cache_salt}
    given = {name: value for name, value in entry.items() if value is not None}
    return yaml.safe_dump([given], sort_keys=False, allow_unicode=True)


def parse_keys(text: str, file: str) -> dict[str, Key]:
    """Keys by their hash. ``text`` is a YAML list of entries: `sha256` (64 hex digits) and `tenant`, if wanted
    `priority` and `cache_salt` (without one, the key shares cached prompts with nobody).

    Raises StartupError that names file, line and field.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise StartupError(f"{file}{f', line {mark.line + 1}' if mark else ''}: this is not YAML") from None
    if not isinstance(root, yaml.SequenceNode):
        raise StartupError(f"{file} must be a list of entries with sha256 and tenant; [] lets nobody in")
    keys: dict[str, Key] = {}
    for node in root.value:
        where = f"{file}, line {node.start_mark.line + 1}"
        entry = dict(_fields(node, file))
        for name in ("sha256", "tenant"):
            if name not in entry:
                raise StartupError(f"{where}: {name} is missing")
        if entry["sha256"] in keys:
            raise StartupError(f"{where}: sha256 stands there twice")
        keys[entry["sha256"]] = Key(
            tenant=entry["tenant"],
            best_priority=entry.get("priority"),
            salt=entry.get("cache_salt", entry["sha256"]),
        )
    return keys


def _fields(entry: yaml.Node, file: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(entry, yaml.MappingNode):
        raise StartupError(f"{file}, line {entry.start_mark.line + 1}: an entry needs sha256 and tenant")
    seen = set()
    for name, value in entry.value:
        where = f"{file}, line {name.start_mark.line + 1}"
        check = _CHECKS.get(name.value) if isinstance(name, yaml.ScalarNode) else None
        if check is None:
            raise StartupError(f"{where}: an entry may hold {', '.join(_CHECKS)}, nothing else")
        if name.value in seen:
            raise StartupError(f"{where}: {name.value} stands there twice")
        seen.add(name.value)
        # The scalar as it was written: a hash that looks like a number is none.
        yield name.value, check(f"{where}: {name.value}", value.value if isinstance(value, yaml.ScalarNode) else "")


def _hash(where: str, text: str) -> str:
    if not _HASH.fullmatch(text.lower()):
        raise StartupError(f"{where} must be the key's SHA-256 in 64 hex digits, as `paceline keys new` prints it")
    return text.lower()


def _text(where: str, text: str) -> str:
    if not 0 < len(text) <= MAX_TEXT_LEN:
        raise StartupError(f"{where} must hold 1 to {MAX_TEXT_LEN} characters")
    return text


def _priority(where: str, text: str) -> int:
    if not _INTEGER.fullmatch(text) or abs(int(text)) > MAX_PRIORITY:
        raise StartupError(f"{where} must be a whole number; lower runs first")
    return int(text)


_CHECKS: dict[str, Callable[[str, str], Any]] = {
    "sha256": _hash,
    "tenant": _text,
    "priority": _priority,
    "cache_salt": _text,
}
