import pytest

from paceline.proto.hashing import chain, prompt_hashes, root


def test_the_names_are_fixed_for_all_hosts_and_versions():
    parent = root("fingerprint", "bfloat16")
    assert parent.hex()[:16] == "d9aea7e1ec1ac2f8"
    assert chain(parent, range(16)).hex()[:16] == "1d625f6b35774f0f"


@pytest.mark.parametrize(
    "other", [("g", "float32", "", ""), ("f", "bfloat16", "", ""), ("f", "float32", "a", ""), ("f", "float32", "", "s")]
)
def test_model_dtype_adapter_and_salt_all_count(other):
    assert root("f", "float32") != root(*other)


def test_parts_cannot_be_shifted_into_one_another():
    assert root("ab", "c") != root("a", "bc")
    assert root("f", "d", "ab", "c") != root("f", "d", "a", "bc")


def test_a_prompt_has_a_name_for_each_full_block_and_each_depends_on_all_before():
    parent = root("f", "float32")
    ids = list(range(50))
    names = prompt_hashes(parent, ids, 16)
    assert len(names) == 3
    assert names[:2] == prompt_hashes(parent, ids[:32], 16)
    ids[0] = 99
    assert not set(names) & set(prompt_hashes(parent, ids, 16))
