"""One table makes flags, variables and file keys. Here: which wins, where each value ends, and what is refused how."""

import typing

import msgspec
import pytest

from paceline.proto.errors import StartupError
from paceline.router import settings
from paceline.router.settings import BY_NAME, CONFIGS, SETTINGS, make, read_file, resolve


def other_than_default(setting):
    """A value that the setting may have and that is not its default, as text."""
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    kind = typing.get_args(setting.type)[0] if hasattr(setting.type, "__metadata__") else setting.type
    return {
        bool: "false" if setting.default else "true",
        int: "2" if setting.default != 2 else "1",
        float: "0.25",
        str: "other",
        tuple[str, ...]: "a:1,b:2",
    }[kind]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_reaches_its_field_from_flag_variable_and_file(setting):
    text = other_than_default(setting)
    for command in setting.commands:
        flag = resolve(command, {setting.name: text}, {}, {})
        variable = resolve(command, {}, {setting.variable: text}, {})
        file = resolve(command, {}, {}, {setting.name: text})
        assert flag == variable == file
        assert flag[setting.name] != setting.default
        for path in setting.into:
            room, field = path.split(".")
            more = {"rank": {"model": "m", "served_model_name": "m"}, "replica": {"rank": None}}
            config = make(room, flag, **more.get(room, {}), **({"replica": None} if room == "cluster" else {}))
            assert getattr(config, field) == flag[setting.name]


def test_flag_beats_variable_beats_file_beats_default():
    flags, environ, file = {"port": "1"}, {"PACELINE_PORT": "2"}, {"port": 3}
    assert resolve("router", flags, environ, file)["port"] == 1
    assert resolve("router", {}, environ, file)["port"] == 2
    assert resolve("router", {}, {}, file)["port"] == 3
    assert resolve("router", {}, {}, {})["port"] == CONFIGS["router"]().port


def test_false_and_zero_given_are_given():
    values = resolve("serve", {"enable_prefix_caching": False, "port": "0"}, {"PACELINE_PORT": "7"}, {})
    assert values["enable_prefix_caching"] is False
    assert values["port"] == 0


def test_every_field_that_a_person_may_want_to_set_has_a_setting():
    made_by_commands = {"model", "served_model_name", "chat_template", "cluster_token", "rank", "replica"}
    limits_of_ours = {"max_unread_bytes", "max_unread_tokens", "slow_reader_seconds"}
    inner = {"num_cpus_per_rank", "namespace"}
    into = {path for setting in SETTINGS for path in setting.into}
    for room, config in CONFIGS.items():
        for field in config.__struct_fields__:
            if field not in made_by_commands | limits_of_ours | inner:
                assert f"{room}.{field}" in into, f"{room}.{field} has no setting"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": "eighty"}, ["--port", "int", "eighty"]),
        ({"port": "70000"}, ["--port", "65535"]),
        ({"dtype": "int8"}, ["--dtype", "int8", "bfloat16"]),
        ({"kv_memory_share": "1.5"}, ["--kv-memory-share", "1.0"]),
        ({"tensor_parallel_size": "0"}, ["--tensor-parallel-size", ">= 1"]),
        ({"rank_memory": "0"}, ["--rank-memory", "> 0"]),
        ({"start_timeout": "0"}, ["--start-timeout", "> 0"]),
    ],
)
def test_a_wrong_value_says_where_it_stood_and_what_it_should_be(flags, words):
    with pytest.raises(StartupError) as caught:
        resolve("serve", flags, {}, {})
    assert all(word in str(caught.value) for word in words)


def test_a_wrong_value_of_a_variable_or_a_file_names_that():
    with pytest.raises(StartupError, match="PACELINE_PORT"):
        resolve("serve", {}, {"PACELINE_PORT": "tcp://10.0.0.1:80"}, {})
    with pytest.raises(StartupError, match=r"my\.yaml: port"):
        resolve("serve", {}, {}, {"port": -1}, "my.yaml")


def write(tmp_path, text):
    path = tmp_path / "paceline.yaml"
    path.write_text(text)
    return path


def test_a_file_may_group_its_keys_in_sections(tmp_path):
    flat = read_file(write(tmp_path, "model: smollm2\nserver:\n  port: 1\nengine: {max_num_seqs: 4}\n"))
    assert flat == {"model": "smollm2", "port": 1, "max_num_seqs": 4}


def test_an_empty_file_and_an_empty_value_set_nothing(tmp_path):
    assert read_file(write(tmp_path, "")) == {}
    assert resolve("serve", {}, {}, read_file(write(tmp_path, "port:\n")))["port"] == 8000


def test_one_file_serves_every_command(tmp_path):
    file = read_file(write(tmp_path, "max_num_seqs: 4\ncontroller: host:1\nreplica: [a:1, b:2]\n"))
    assert resolve("router", {}, {}, file)["replica"] == ("a:1", "b:2")
    assert "controller" not in resolve("serve", {}, {}, file)


def test_a_list_may_be_written_with_commas_wherever_it_stands():
    flag = {"open_routes": ["/health/ready,/metrics", "/version"]}  # a flag that was given twice
    for given in (resolve("router", flag, {}, {}), resolve("router", {}, {}, flag)):
        assert given["open_routes"] == ("/health/ready", "/metrics", "/version")
    assert resolve("router", {}, {"PACELINE_OPEN_ROUTES": "/metrics, /version"}, {})["open_routes"][1] == "/version"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seq: 4", ["max-num-seq", "max_num_seqs"]),
        ("engine: {max_num_sequences: 4}", ["max_num_sequences", "max_num_seqs"]),
        ("port: 1\nserver: {port: 2}", ["port", "twice"]),
        ("- a", ["keys"]),
        ("a: [", ["YAML"]),
        ("serverr: {port: 1}", ["serverr", "server"]),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_one(tmp_path, text, words):
    with pytest.raises(StartupError) as caught:
        read_file(write(tmp_path, text))
    assert all(word in str(caught.value) for word in words)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(StartupError, match="cannot be read"):
        read_file(tmp_path / "none.yaml")


def test_names_are_unique_and_helped():
    assert len(BY_NAME) == len(SETTINGS)
    assert all(setting.help.endswith(".") for setting in SETTINGS)
    assert not settings.SECTIONS - {"model", "engine"} & BY_NAME.keys()


def test_defaults_are_those_of_the_configs():
    for setting in SETTINGS:
        for path in setting.into:
            room, name = path.split(".")
            field = next(f for f in msgspec.structs.fields(CONFIGS[room]) if f.name == name)
            if path != "rank.dump_dir":  # a library user gets no dumps, a server does
                assert field.default == setting.default, path
