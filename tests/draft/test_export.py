"""An export is whole, audited against what SGLang's loader reads, and loads back as the same draft."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_helpers.draft.export import audit, export_digest, export_sglang, load_exported
from eagle3_helpers.draft.model import Draft, DraftConfig
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.params import DraftParams, TargetParams
from eagle3_helpers.samples.vocab import DraftVocab
from eagle3_helpers.target import Target
from tests.makers import make_target

SIZE = 96


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = make_target(tmp_path_factory.mktemp("target"), tied=True)
    return Target(TargetParams(path=str(folder), dtype="float32"))


@pytest.fixture(scope="module")
def draft_vocab() -> DraftVocab:
    ids = torch.arange(SIZE) * 4  # no run of neighbours, so that every wrong d2t shows
    return DraftVocab(ids - torch.arange(SIZE), torch.zeros(384, dtype=torch.bool).index_fill(0, ids, True), 0.9)


@pytest.fixture(scope="module")
def draft(target, draft_vocab) -> Draft:
    config = DraftConfig.from_params(DraftParams(vocab_size=SIZE), target)
    return Draft(config).initialise(target, draft_vocab, seed=1)


@pytest.fixture
def export(draft, draft_vocab, target):
    """export(folder, **changed weights): the folder, exported; a weight given as None is left out."""

    def run(folder, **changed):
        weights = {**draft.trained_weights(), **changed}
        weights = {name: weight for name, weight in weights.items() if weight is not None}
        return export_sglang(weights, draft.config, draft_vocab, target, folder)

    return run


def damage(folder, config=None, **tensors) -> None:
    """Rewrites the export at `folder` with other config keys and tensors; None removes one."""
    for path, changed in ((folder / "config.json", config or {}), (folder / "model.safetensors", tensors)):
        values = json.loads(path.read_text()) if path.suffix == ".json" else load_file(path)
        values = {name: value for name, value in {**values, **changed}.items() if value is not None}
        if path.suffix == ".json":
            path.write_text(json.dumps(values))
        else:
            save_file(values, path)


def failed(folder, target) -> set[str]:
    return {item["check"] for item in audit(folder, target).items if not item["ok"]}


def test_the_export_loads_back_as_the_same_draft_in_bfloat16(export, draft, draft_vocab, target, tmp_path):
    export(tmp_path / "export")
    loaded, vocab = load_exported(tmp_path / "export", target)
    assert loaded.config == draft.config
    assert torch.equal(vocab.d2t, draft_vocab.d2t) and torch.equal(vocab.t2d, draft_vocab.t2d)
    assert vocab.coverage == draft_vocab.coverage
    for name, weight in draft.trained_weights().items():
        assert torch.equal(loaded.state_dict()[name], weight.bfloat16().float()), name
    assert torch.equal(loaded.embed_tokens.weight, target.embedding())


def test_the_config_names_what_the_server_reads(export, target, tmp_path):
    export(tmp_path / "export")
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"]) == (384, SIZE)
    assert config["tie_word_embeddings"] is False  # although the target's are tied
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [k - 1 for k in target.boundaries]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["torch_dtype"] == "bfloat16" and "norm_output" not in config
    tensors = load_file(tmp_path / "export/model.safetensors")
    assert "embed_tokens.weight" not in tensors and len(tensors["lm_head.weight"]) == SIZE
    assert {str(t.dtype) for n, t in tensors.items() if n not in ("d2t", "t2d")} == {"torch.bfloat16"}


def test_a_scaled_rope_stands_in_both_forms(tmp_path, draft_vocab):
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
    target = Target(TargetParams(path=str(make_target(tmp_path / "target", rope_parameters=rope)), dtype="float32"))
    config = DraftConfig.from_params(DraftParams(vocab_size=SIZE), target)
    weights = Draft(config).initialise(target, draft_vocab, 0).trained_weights()
    export_sglang(weights, config, draft_vocab, target, tmp_path / "export")
    written = json.loads((tmp_path / "export/config.json").read_text())
    assert written["rope_theta"] == 5e5 and written["rope_scaling"]["factor"] == 4.0
    assert "rope_theta" not in written["rope_scaling"] and written["rope_parameters"]["rope_type"] == "yarn"
    assert load_exported(tmp_path / "export", target)[0].config.rope_parameters == config.rope_parameters
    damage(tmp_path / "export", config={"rope_scaling": {**written["rope_scaling"], "factor": 2.0}})
    assert failed(tmp_path / "export", target) == {"rope_theta, rope_scaling"}


@pytest.mark.parametrize(
    ("config", "tensors", "check"),
    [
        ({}, {"d2t": None}, "tensors missing"),
        ({}, {"d2t": torch.arange(SIZE) * 4}, "t2d marks the ids"),  # absolute ids
        ({}, {"d2t": torch.zeros(SIZE, dtype=torch.int64)}, "t2d marks the ids"),
        ({}, {"d2t": torch.full((SIZE,), 384)}, "d2t: ids in range"),
        ({}, {"d2t": -torch.arange(SIZE)}, "d2t: ids rise"),
        ({}, {"d2t": torch.zeros(SIZE, dtype=torch.int32)}, "shapes and dtypes"),
        ({}, {"t2d": torch.ones(384, dtype=torch.bool)}, "t2d count"),
        ({}, {"lm_head.weight": None}, "tensors missing"),
        ({}, {"norm.weight": None, "final_norm.weight": torch.ones(32).bfloat16()}, "tensors unexpected"),
        ({}, {"fc.weight": torch.ones(32, 32).bfloat16()}, "shapes and dtypes"),
        ({}, {"norm.weight": torch.ones(32)}, "shapes and dtypes"),
        ({}, {"norm.weight": torch.full((32,), float("nan")).bfloat16()}, "finite values"),
        ({}, {"embed_tokens.weight": torch.ones(384, 32).bfloat16()}, "embed_tokens"),
        ({"norm_output": True}, {}, "norm flags"),
        ({"norm_before_residual": True}, {}, "norm flags"),
        ({"tie_word_embeddings": True}, {}, "tie_word_embeddings"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "architectures"),
        ({"draft_vocab_size": None}, {}, "config keys"),
        ({"vocab_size": 500}, {}, "vocab_size"),
        ({"max_position_embeddings": 64}, {}, "max_position_embeddings"),
        ({"eagle_config": None}, {}, "layer ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, {}, "use_aux_hidden_state"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}, "rope_parameters"),
    ],
)
def test_a_fault_is_caught_by_name_and_the_export_is_not_loaded(export, target, tmp_path, config, tensors, check):
    export(tmp_path / "export")
    assert audit(tmp_path / "export", target).ok
    damage(tmp_path / "export", config, **tensors)
    assert check in failed(tmp_path / "export", target)
    with pytest.raises(CheckRefused, match=check.replace(":", ".")):
        load_exported(tmp_path / "export", target)


def test_a_missing_tensor_and_a_renamed_one_are_named(export, target, tmp_path):
    export(tmp_path / "export")
    damage(tmp_path / "export", **{"midlayer.hidden_norm.weight": None, "layers.0.hidden_norm.w": torch.ones(1)})
    with pytest.raises(CheckRefused) as caught:
        load_exported(tmp_path / "export", target)
    assert "midlayer.hidden_norm.weight" in str(caught.value) and "layers.0.hidden_norm.w" in str(caught.value)


def test_weights_that_would_serve_badly_are_not_exported(export, tmp_path):
    bad = {"lm_head.weight": None}, {"norm.weight": torch.full((32,), float("nan"))}, {"head.weight": torch.ones(2)}
    for changed, said in zip(bad, ("lm_head.weight", "norm.weight", "head.weight"), strict=True):
        with pytest.raises(CheckRefused, match=said):
            export(tmp_path / "export", **changed)
    assert list(tmp_path.iterdir()) == []


def test_wrapper_prefixes_are_stripped_and_the_embedding_is_left_out(draft, draft_vocab, target, export, tmp_path):
    wrapped = {f"module._orig_mod.{name}": weight for name, weight in draft.state_dict().items()}
    assert export_sglang(wrapped, draft.config, draft_vocab, target, tmp_path / "a") == export(tmp_path / "b")


def test_an_equal_export_is_kept_and_a_different_one_is_moved_aside(export, target, tmp_path):
    digest = export(tmp_path / "export")
    assert {export(tmp_path / f"again-{n}" / "export") for n in range(4)} == {digest}
    before = (tmp_path / "export/model.safetensors").stat()
    assert export(tmp_path / "export") == digest == export_digest(tmp_path / "export")
    after = (tmp_path / "export/model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    other = export(tmp_path / "export", **{"norm.weight": torch.full((32,), 2.0)})
    assert other != digest and export_digest(tmp_path / "export") == other
    assert export_digest(tmp_path / f"export.replaced-{digest}") == digest
    for _ in range(2):  # to and fro: each is kept once
        export(tmp_path / "export")
        export(tmp_path / "export", **{"norm.weight": torch.full((32,), 2.0)})
    kept = {path.name for path in tmp_path.iterdir() if not path.name.startswith("again")}
    assert kept == {"export", f"export.replaced-{digest}", f"export.replaced-{other}"}


def test_half_an_export_of_a_crash_is_replaced_and_a_foreign_folder_is_not(export, target, tmp_path):
    (tmp_path / ".writing-export").mkdir()
    (tmp_path / ".writing-export/model.safetensors").write_bytes(b"half")
    export(tmp_path / "export")
    assert audit(tmp_path / "export", target).ok and [p.name for p in tmp_path.iterdir()] == ["export"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("mine")
    with pytest.raises(CheckRefused, match="is not an export"):
        export(tmp_path / "thesis")
    assert (tmp_path / "thesis/chapter.txt").read_text() == "mine" and not (tmp_path / ".writing-thesis").exists()


def test_no_folder_and_the_draft_of_another_target_are_refused(export, target, tmp_path):
    for folder in ("", tmp_path / "none"):
        with pytest.raises(BadParams):
            load_exported(folder, target)
    export(tmp_path / "export")
    other = Target(TargetParams(path=str(make_target(tmp_path / "other", hidden_size=64)), dtype="float32"))
    with pytest.raises(CheckRefused, match=r"hidden_size: 32 \(expected 64\)"):
        load_exported(tmp_path / "export", other)
    (tmp_path / "export/model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckRefused, match="cannot be read"):
        load_exported(tmp_path / "export", target)


def test_layer_ids_that_a_deepseek_target_would_shift_are_refused(export, target, tmp_path, monkeypatch):
    export(tmp_path / "export")
    monkeypatch.setitem(target.config, "model_type", "deepseek_v3")
    assert audit(tmp_path / "export", target).ok  # [2, 4, 5] are written [1, 3, 4]: SGLang's class adds 1
    monkeypatch.setitem(target.__dict__, "boundaries", [3, 4, 5])
    damage(
        tmp_path / "export",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "use_aux_hidden_state": True}},
    )
    assert failed(tmp_path / "export", target) == {"layer ids rule"}
