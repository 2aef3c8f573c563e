import pickle

import grpc
import pytest

from paceline.proto.errors import BY_CODE, InternalError, PacelineError, StartupError, from_wire


@pytest.mark.parametrize("leaf", BY_CODE.values())
def test_every_leaf_has_a_status_for_each_surface(leaf):
    assert 400 <= leaf.http_status < 600
    assert grpc.StatusCode[leaf.grpc_code]
    assert leaf.scope in ("request", "replica", "cluster")
    assert not (leaf.retryable and leaf.http_status == 400)


@pytest.mark.parametrize("leaf", BY_CODE.values())
def test_every_leaf_survives_pickling_whole(leaf):
    error = pickle.loads(pickle.dumps(leaf("why", "field", 2.0)))
    assert type(error) is leaf
    assert (str(error), error.param, error.retry_after) == ("why", "field", 2.0)


def test_codes_are_unique_and_an_unknown_one_keeps_its_text():
    def leaves(cls) -> list[type[PacelineError]]:
        return [cls] * ("code" in vars(cls)) + [leaf for child in cls.__subclasses__() for leaf in leaves(child)]

    codes = [leaf.code for leaf in leaves(PacelineError) if leaf is not PacelineError]
    assert len(codes) == len(set(codes))
    assert StartupError.code in BY_CODE
    error = from_wire("from_the_future", "why")
    assert isinstance(error, InternalError)
    assert error.message == "why"
