from tests.e2e.overload import FLAGS, overload
from tests.e2e.server import serving
from tests.models import tiny_llama_folder


async def test_what_is_too_much_is_refused_at_once_and_what_waits_too_long_is_never_computed(tmp_path):
    # Wide enough that a step takes milliseconds: those that run do so for the whole test.
    model = tiny_llama_folder(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
                              max_position_embeddings=1024)  # fmt: skip
    with serving(tmp_path / "log", "--model", str(model), *FLAGS) as server:
        print(await overload(server.url))
