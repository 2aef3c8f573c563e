"""docs/models.md tells of the models that there are."""

from pathlib import Path

from paceline.worker.supported import supported

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"


def test_the_table_is_the_registrys():
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    told = [row[:4] for row in rows if row[0] != "family"]
    known = [
        [model.name, ", ".join(model.architectures), ", ".join(model.gguf) or "-", "yes" if model.windows else "-"]
        for model in supported()
    ]
    assert sorted(told) == sorted(known)
