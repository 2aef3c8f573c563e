"""The committed *_pb2 files are what the .proto files say."""

import os
import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).resolve().parents[2] / "proto"


def test_the_generated_files_are_current(tmp_path):
    done = subprocess.run(
        [str(PROTO / "generate.sh"), str(tmp_path)],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    fresh = sorted(path.name for path in tmp_path.iterdir())
    assert fresh == sorted(path.name for path in PROTO.glob("*_pb2*"))
    for name in fresh:
        assert (tmp_path / name).read_text() == (PROTO / name).read_text(), f"{name}: run `make proto`"
