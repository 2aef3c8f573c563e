"""docs/api.md is what the code's tables say."""

import re
from pathlib import Path

import pytest

from paceline.proto import inference_pb2 as pb
from paceline.router import reference
from paceline.router.config import RouterConfig
from paceline.router.fields import FIELDS
from paceline.router.openapi import ROUTES

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_on_disk_is_the_one_that_make_docs_writes():
    assert PAGE.read_text() == reference.page()


def test_every_field_and_every_route_has_a_line_and_no_placeholder_is_left():
    page = reference.page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for field in FIELDS:
        assert any(row.startswith(f"| `{field.name}`") and field.doc in row for row in rows), field.name
    for route in ROUTES:
        assert any(f"{route.method.upper()} {route.path}`" in row for row in rows), route.path
    assert not re.search(r"@[A-Z]", page)


def test_a_change_of_the_tables_changes_the_page(monkeypatch):
    monkeypatch.setattr(reference, "CONFIG", RouterConfig(max_n=77))
    assert "integer, 1 to 77" in reference.page()


@pytest.mark.parametrize("message", [pb.Sampling, pb.Output])
def test_every_option_of_grpc_appears(message):
    prefix = message.DESCRIPTOR.name.lower()
    named = set(re.findall(rf"`{prefix}\.(\w+)`", reference.page()))
    assert named == set(message.DESCRIPTOR.fields_by_name) - {"text"}
