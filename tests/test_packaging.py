"""The folders are the packages, and what a room may need is what its users install."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_list_of_packages_is_the_folders_on_disk():
    on_disk = {
        "paceline." + str(path.parent.relative_to(ROOT)).replace("/", ".")
        for room in ("proto", "worker", "cluster", "router")
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk


def test_every_room_can_be_imported_from_another_folder(tmp_path):
    code = "import paceline.proto.codec, paceline.router.app, paceline.cluster.replica, paceline.worker.sources"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60).returncode == 0


def test_a_router_and_a_controller_come_up_without_torch():
    code = (
        "import sys\n"
        "import paceline.router.app, paceline.router.cli, paceline.cluster.replica\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "import paceline.cluster.controller\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_torch_and_ray_are_only_in_the_extra_for_serving():
    base = " ".join(PROJECT["project"]["dependencies"])
    assert "torch" not in base
    assert "ray" not in base
    assert {"torch", "ray"} <= {d.split(">")[0] for d in PROJECT["project"]["optional-dependencies"]["serve"]}
