"""What a target's folder is, what it may lack, and what makes it another target."""

import json
import os
import shutil

import pytest

from eagle3_helpers import target as target_module
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.params import TargetParams, TargetShape
from eagle3_helpers.target import Target
from tests.makers import make_target


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("made") / "target")


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A model folder of its own, and a home of its own."""
    monkeypatch.setenv("EAGLE3_RUNBOOK_HOME", str(tmp_path))
    return shutil.copytree(made, tmp_path / "target")


def at(folder, **params) -> Target:
    return Target(TargetParams(path=str(folder), **params))


def change(folder, name: str = "config.json", **values) -> None:
    path = folder / name
    old = json.loads(path.read_text()) if path.exists() else {}
    merged = {key: value for key, value in {**old, **values}.items() if value is not None}
    path.write_text(json.dumps(merged))


def refusal(look) -> str:
    with pytest.raises(BadParams) as caught:
        look()
    return str(caught.value)


@pytest.mark.parametrize("text", [b'{"hidden_size": 3', b"", b"[1]", b"\xff\xfe"])
def test_a_damaged_config_is_refused(folder, text):
    (folder / "config.json").write_bytes(text)
    assert f"{folder / 'config.json'} is damaged" in refusal(lambda: at(folder).shape)


@pytest.mark.parametrize("name", ["num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_config_without_a_size_is_refused_with_its_name(folder, name):
    change(folder, **{name: None})
    assert f"config.json does not say {name}." in refusal(lambda: at(folder).boundaries)


@pytest.mark.parametrize("value", ["32", 0, 3.5, [32]])
def test_a_size_that_cannot_be_is_refused_with_its_value(folder, value):
    change(folder, num_attention_heads=value, head_dim=None)
    assert f"num_attention_heads = {value!r}" in refusal(lambda: at(folder).shape)


def test_sizes_that_a_config_leaves_out_follow_from_the_others(folder):
    change(folder, num_key_value_heads=None, head_dim=None)
    assert (at(folder).shape.num_key_value_heads, at(folder).shape.head_dim) == (4, 8)


def test_a_wrapped_language_model_is_read_through_its_wrapper(folder):
    config = json.loads((folder / "config.json").read_text())
    expected = at(folder).shape
    (folder / "config.json").write_text(json.dumps({"model_type": "vision", "text_config": config}))
    assert at(folder).shape == expected


def test_the_shape_needs_no_weights_and_no_folder_where_the_params_give_it(folder, tmp_path):
    expected = at(folder).shape
    (folder / "model.safetensors").unlink()
    assert at(folder).shape == expected
    assert "holds no *.safetensors" in refusal(lambda: at(folder).identity)
    given = TargetShape(**expected.model_dump())
    assert at(tmp_path / "absent", shape=given).shape == given


def test_a_damaged_generation_config_and_an_id_that_is_none_are_refused(folder):
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json is damaged" in refusal(lambda: at(folder).stop_ids)
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    assert "eos_token_id = ['</s>'] is no token id" in refusal(lambda: at(folder).stop_ids)


def test_stop_ids_are_those_of_the_generation_config_and_the_tokenizer(folder):
    change(folder, "generation_config.json", eos_token_id=[5, 7])
    assert at(folder).stop_ids == sorted({5, 7, at(folder).tokenizer.eos_token_id})


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tiktoken.model",
        "vocab.txt",
        "tokenization_kimi.py",
        "modeling_kimi.py",
        "added_tokens.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_a_file_that_may_decide_ids_or_states_makes_another_target(folder, name):
    before, tokens = at(folder).identity, at(folder).tokenizer_digest
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    with open(path, "a") as file:
        file.write(" ")
    after = at(folder).identity
    assert [key for key in after["files"] if after["files"][key] != before["files"].get(key)] == [name]
    assert at(folder).tokenizer_digest != tokens
    assert after["weights"] == before["weights"]


def test_documents_pictures_and_other_layouts_of_the_weights_make_no_difference(folder):
    before = at(folder).identity
    for name in ("README.md", "LICENSE.txt", "NOTES.md", ".gitattributes", "logo.PNG", "unpacked.json", "x.bin"):
        (folder / name).write_text(name)
    (folder / "original").mkdir()
    assert at(folder).identity == before


def test_a_target_is_known_once_its_weights_were_hashed_and_not_after_they_change(folder):
    assert at(folder).known_identity is None
    assert at(folder).identity == at(folder).known_identity
    os.utime(folder / "model.safetensors", ns=(0, 0))
    assert at(folder).known_identity is None


def test_weights_are_hashed_once_and_the_memory_of_it_may_be_lost_or_damaged(folder, tmp_path, monkeypatch):
    hashed = []
    original = target_module.file_digest
    monkeypatch.setattr(target_module, "file_digest", lambda file: hashed.append(file.name) or original(file))
    first = at(folder).identity
    assert at(folder).identity == first
    assert hashed.count("model.safetensors") == 1
    for damage in (b"[]", b"{", None):
        path = tmp_path / "outputs" / "cache" / "weight_digests.json"
        path.unlink() if damage is None else path.write_bytes(damage)
        assert at(folder).known_identity is None
        assert at(folder).identity == first


def test_damaged_weights_are_refused_with_the_files_name(folder):
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    for look in (lambda: at(folder).head(), lambda: at(folder).load_model("float32", "cpu")):
        with pytest.raises(CheckRefused, match=str(folder)):
            look()


def test_a_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    assert f"the tokenizer in {folder} does not load" in refusal(lambda: at(folder).tokenizer)
