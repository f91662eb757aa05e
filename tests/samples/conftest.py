import pytest

from eagle3_helpers.params import Params, TargetParams
from eagle3_helpers.target import Target
from tests.makers import make_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("samples") / "target")


@pytest.fixture
def target(target_folder) -> Target:
    """The tiny target with a tokenizer of its own, whose template a test may change."""
    return Target(TargetParams(path=str(target_folder), dtype="float32"))


@pytest.fixture
def params(target_folder, tmp_path):
    def make(**samples) -> Params:
        return Params.model_validate(
            {
                "run_id": "tiny",
                "target": {"path": str(target_folder), "dtype": "float32"},
                "samples": {"conversations": str(tmp_path / "conversations.jsonl"), "max_length": 200, **samples},
                "store": {"data_root": str(tmp_path / "data"), "name": "tiny"},
                "evaluation": {"prompts": "unused"},
            }
        )

    return make
