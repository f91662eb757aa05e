"""A tiny random target, captured for real by transformers."""

import pytest

from eagle3_helpers.capture.transformers_backend import capture_record
from eagle3_helpers.params import Params, load_params
from eagle3_helpers.states.store import Store
from eagle3_helpers.target import Target
from tests.makers import make_home
from tests.states.conftest import make_table

LENGTHS = (9, 30, 17, 9, 24, 5, 12, 40, 9, 21)


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    make_home(home)
    return home


@pytest.fixture
def params(home, tmp_path) -> Params:
    (tmp_path / "data").mkdir()
    return load_params(
        home / "params" / "tiny.yaml", {"store.data_root": str(tmp_path / "data"), "capture.batch_tokens": 70}
    )


@pytest.fixture
def target(params) -> Target:
    return Target(params.target)


@pytest.fixture
def table():
    return make_table(LENGTHS)


@pytest.fixture
def store(params, target) -> Store:
    return Store.create(params.store_folder, capture_record(params, target))
