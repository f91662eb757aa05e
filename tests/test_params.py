"""A params file that cannot be meant as written is refused with the line, the value and what would be allowed."""

import re
from pathlib import Path

import pytest
import yaml

from eagle3_helpers.errors import BadParams
from eagle3_helpers.params import Params, load_params
from eagle3_helpers.params_reference import commented_params, reference_table, settings
from tests.makers import params_values

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def write(tmp_path):
    def file(text: str = "", **sections) -> Path:
        path = tmp_path / "p.yaml"
        path.write_text(text or yaml.safe_dump(params_values(tmp_path, **sections), sort_keys=False))
        return path

    return file


def refusal(path, overrides=None) -> str:
    with pytest.raises(BadParams) as caught:
        load_params(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_misspelt_name_is_refused_with_its_line_and_the_name_that_was_meant(write):
    path = write(training={"epohcs": 3})
    line = path.read_text().splitlines().index("  epohcs: 3") + 1
    assert f"line {line}: training.epohcs is not a known name. Did you mean epochs?" in refusal(path)


def test_lr_1e_4_without_a_dot_is_text_to_yaml_and_refused(write):
    text = write().read_text().replace("lr: 0.003", "lr: 1e-4")
    assert "training.lr is the text '1e-4', not a number; write 0.0001" in refusal(write(text))


def test_yes_for_a_name_is_refused(write):
    assert "run_id is the truth value True" in refusal(
        write(write().read_text().replace("run_id: tiny", "run_id: yes"))
    )


def test_a_truth_value_is_no_number(write):
    assert "training.epochs = True" in refusal(write(training={"epochs": True}))


def test_a_name_given_twice_is_refused(write):
    text = write().read_text() + "run_id: other\n"
    assert "run_id is given twice" in refusal(write(text))


def test_a_run_id_cannot_leave_the_outputs_folder(write):
    assert "run_id = '../elsewhere'" in refusal(write(run_id="../elsewhere"))


def test_a_missing_setting_is_named(write):
    values = yaml.safe_load(write().read_text())
    del values["target"]["path"]
    assert "target.path is missing" in refusal(write(yaml.safe_dump(values)))


@pytest.mark.parametrize("text", ["[", "just words", "# nothing", "\t- x: ["])
def test_a_file_that_is_no_params_file_is_refused(write, text):
    assert "p.yaml" in refusal(write(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run_id: !!python/object/apply:os.getcwd []", "python/object/apply:os.getcwd"),
        ("? [a, b]\n: 1", "line 1: a name is a word"),
        ("run_id: tiny\ntarget:\n  ? {a: b}\n  : 1", "line 3: a name is a word"),
        ("run_id: 2024-13-45", "month must be in 1..12"),
        ("run_id: &a {b: *a}", "RecursionError|recursion"),
        ("1: x", "1"),
        ("run_id: tiny\x07", "not allowed"),
    ],
)
def test_what_yaml_cannot_make_settings_of_is_refused(write, text, words):
    assert re.search(words, refusal(write(text)))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("run_id: tiny  # größer".encode("latin-1"))
    assert "latin.yaml is not UTF-8" in refusal(tmp_path / "latin.yaml")


def test_a_folder_and_an_unknown_home_are_refused(tmp_path):
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    assert "~nobody-here/p.yaml" in refusal("~nobody-here/p.yaml")


def test_infinity_is_no_setting(write):
    assert "store.reserve_gb = inf" in refusal(write(store={"reserve_gb": float("inf")}))


def test_an_unknown_number_of_the_targets_shape_is_refused(write):
    assert "target.shape.layers is not a known name" in refusal(write(target={"shape": {"layers": 3}}))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "cannot be read" in refusal(tmp_path / "absent.yaml")


def test_overrides_change_single_settings_and_unknown_ones_are_errors(write):
    assert load_params(write(), {"training.lr": 0.5}).training.lr == 0.5
    assert "training.rl is not a known name" in refusal(write(), {"training.rl": 0.5})
    assert "run_id is not a section" in refusal(write(), {"run_id.x": 1})


@pytest.mark.parametrize("path", sorted((ROOT / "params").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_params_file_that_is_shipped_is_valid(path):
    assert load_params(path).run_id == path.stem


def test_a_written_params_file_holds_every_setting_and_reads_back_as_the_defaults(tmp_path):
    given = {
        "run_id": "mine",
        "target.path": "modèles/🦅",
        "samples.conversations": "c",
        "store.data_root": "d",
        "store.name": "s",
        "evaluation.prompts": "p",
    }
    (tmp_path / "mine.yaml").write_text(commented_params(given))
    loaded = load_params(tmp_path / "mine.yaml")
    plain = {name.partition(".")[0]: {} for name in given if "." in name}
    for name, value in given.items():
        section, _, inner = name.partition(".")
        if inner:
            plain[section][inner] = value
    assert loaded == Params.model_validate({"run_id": "mine", **plain})


def test_every_setting_says_what_it_means():
    assert [name for name, field in settings() if not field.description] == []


def test_the_readme_lists_every_setting():
    readme = (ROOT / "README.md").read_text()
    assert reference_table() in readme
