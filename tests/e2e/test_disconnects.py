"""Ten clients go away in every state; the prover sends three hundred."""

import grpc.aio

from tests.e2e.disconnects import FLAGS, Grpc, Http, disconnects
from tests.e2e.server import free_port, serving
from tests.models import tiny_llama_folder


async def test_a_client_that_is_gone_leaves_nothing_behind_in_any_state(tmp_path):
    # Wide enough that a step takes milliseconds: states last long enough to be met.
    model = tiny_llama_folder(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
                              max_position_embeddings=1024)  # fmt: skip
    port = str(free_port())
    with serving(tmp_path / "log", "--model", str(model), "--grpc-port", port, *FLAGS) as server:
        print(await disconnects(Http(server.url), 10))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            print(await disconnects(Grpc(server.url, channel), 10))
