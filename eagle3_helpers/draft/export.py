"""The draft as a folder that SGLang serves (`LlamaForCausalLMEagle3`), its audit, and the way back.

SGLang's loader skips unknown tensors and leaves missing ones uninitialised, and falls back to default layers when
`eagle_config` does not parse, each without a word: acceptance is then about 1.00. So the audit compares names, shapes and
config keys with what that loader reads, and `load_exported` takes nothing less.

- `embed_tokens` is left out on purpose: SGLang puts the target's embedding in its place.
- `d2t` holds offsets: draft id k is target id k + d2t[k]. `t2d` marks those ids; SGLang ignores it, the audit does not.
- Layer ids are boundaries - 1: SGLang's Llama and Qwen classes add 1 to each id. Its DeepSeek and Kimi classes add 1 only
  if the first id is 1, so for these any other first boundary is refused.
- The folder appears at its name whole: written beside it under a temporary name, synced, renamed.
"""

import json
import math
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle3_helpers.display import Checks
from eagle3_helpers.draft.model import EMBEDDING, WRAPPERS, Draft, DraftConfig, rope_parameters
from eagle3_helpers.durable import TEMPORARY, digest, file_digest, read_json, sync_folder, write_json
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.samples.vocab import DraftVocab
from eagle3_helpers.target import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"
FILES = ("config.json", "model.safetensors")
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
)
NORM_FLAGS = ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "bias")
ONE_BY_FIRST_ID = ("deepseek", "kimi")  # model types whose SGLang class adds 1 only if the first layer id is 1


def served_config(config: DraftConfig, target: Target) -> dict:
    """config.json of the export. Rope stands in it twice: transformers 5 reads rope_parameters, older ones the other two."""
    values, rope = config.to_dict(), dict(config.rope_parameters)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{name: values[name] for name in SHAPE_KEYS},
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if scaling != {"rope_type": "default"} else None,
        "rope_parameters": rope,
        "bos_token_id": target.config.get("bos_token_id"),
        "eos_token_id": target.config.get("eos_token_id"),
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in config.boundaries],
            "use_aux_hidden_state": True,
        },
    }


def export_sglang(
    weights: dict[str, torch.Tensor], config: DraftConfig, draft_vocab: DraftVocab, target: Target, folder: Path
) -> str:
    """Writes the folder, audits it, and returns its digest (64 hex, over both files).

    Weights are rounded to bfloat16. An export of equal digest that is there already is kept; a different one is moved
    aside to `<name>.replaced-<its digest>`. Raises CheckRefused for missing, unexpected, misshapen or
    non-finite weights, for a draft vocabulary or a rope that does not fit, and where `folder` holds something else.
    """
    folder = Path(folder)
    if folder.exists() and not all((folder / name).is_file() for name in FILES):
        raise CheckRefused(f"{folder} is there and is not an export.", "Move it away or export to another name.")
    wrapped = re.compile(rf"^(?:{'|'.join(map(re.escape, WRAPPERS))})+")
    tensors = {wrapped.sub("", name): weight for name, weight in weights.items()}
    tensors.pop(EMBEDDING, None)
    tensors = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in tensors.items()}
    tensors |= {"d2t": draft_vocab.d2t.contiguous(), "t2d": draft_vocab.t2d.contiguous()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing = folder.parent / f"{TEMPORARY}{folder.name}"
    if writing.exists():  # half an export that a crash left; this name is nobody else's
        shutil.rmtree(writing)
    writing.mkdir()
    # Coverage stands here and not in the tensors' metadata: of two keys there, safetensors writes either first.
    coverage = {} if math.isnan(draft_vocab.coverage) else {"draft_vocab_coverage": draft_vocab.coverage}
    write_json(writing / "config.json", {**served_config(config, target), **coverage})
    save_file(tensors, writing / "model.safetensors", metadata={"format": "pt"})
    with open(writing / "model.safetensors", "rb") as file:
        os.fsync(file.fileno())
    sync_folder(writing)
    try:
        audit(writing, target).require()
    except CheckRefused:
        shutil.rmtree(writing)
        raise
    new = export_digest(writing)
    if folder.exists():
        old = export_digest(folder)
        if old == new:
            shutil.rmtree(writing)
            return new
        aside = folder.with_name(f"{folder.name}.replaced-{old}")
        if aside.exists() and export_digest(aside) == old:  # the same export was moved aside before
            shutil.rmtree(folder)
        else:
            os.rename(folder, aside)
    os.rename(writing, folder)
    sync_folder(folder.parent)
    return new


def export_digest(folder: Path) -> str:
    """sha256 (64 hex) over the digests of both files. Raises OSError where one is missing."""
    return digest({name: file_digest(Path(folder) / name) for name in FILES})


def load_exported(folder: Path, target: Target) -> tuple[Draft, DraftVocab]:
    """The draft in float32 with the target's embedding, and its vocabulary.

    Raises BadParams where there is no export at `folder`, CheckRefused naming everything the audit finds wrong.
    """
    folder = Path(folder)
    if not str(folder).strip("."):
        raise BadParams("no draft folder is given.", "Give the folder that the export wrote.")
    if not (folder / "config.json").is_file():
        raise BadParams(f"{folder} holds no config.json, so it is no exported draft.", "Export the draft first.")
    audit(folder, target).require()
    values = read_json(folder / "config.json")
    config = DraftConfig(
        **{name: values[name] for name in SHAPE_KEYS},
        rope_parameters=rope_parameters(values),
        boundaries=[layer + 1 for layer in values["eagle_config"]["eagle_aux_hidden_state_layer_ids"]],
    )
    tensors = load_file(folder / "model.safetensors")
    coverage = values.get("draft_vocab_coverage")
    vocab = DraftVocab(tensors.pop("d2t"), tensors.pop("t2d"), float("nan") if coverage is None else coverage)
    return Draft(config).load_weights(tensors, target.embedding()), vocab


def audit(folder: Path, target: Target) -> Checks:
    """Everything SGLang's loader would take or skip in silence, as a list of checks; raises nothing itself."""
    folder = Path(folder)
    checks = Checks(f"Export {folder.name}")
    values = read_json(folder / "config.json")
    checks.add("config.json", isinstance(values, dict), "read" if isinstance(values, dict) else "missing or not JSON")
    try:
        tensors = load_file(folder / "model.safetensors")
        checks.add("model.safetensors", True, f"{len(tensors)} tensors")
    except (OSError, SafetensorError) as error:
        tensors = None
        checks.add("model.safetensors", False, f"cannot be read: {error}", remedy="Export the draft again.")
    absent = [name for name in SHAPE_KEYS if isinstance(values, dict) and values.get(name) is None]
    if isinstance(values, dict):
        checks.add("config keys", not absent, f"missing {', '.join(absent)}" if absent else "all there")
    if not isinstance(values, dict) or absent:
        return checks
    _check_config(checks, values, target)
    if tensors is not None:
        _check_tensors(checks, tensors, values, target)
    return checks


def _check_config(checks: Checks, values: dict, target: Target) -> None:
    def same(name: str, observed, expected, remedy: str = "") -> None:
        checks.add(name, observed == expected, _plain(observed), _plain(expected), remedy)

    same("architectures", values.get("architectures"), [ARCHITECTURE])
    same("model_type", values.get("model_type"), "llama")
    same("num_hidden_layers", values.get("num_hidden_layers"), 1)
    same("hidden_size", values["hidden_size"], target.shape.hidden_size, "The draft belongs to another target.")
    same("vocab_size", values["vocab_size"], target.shape.vocab_size, "It must be the target's.")
    same("tie_word_embeddings", values.get("tie_word_embeddings"), False, "Tied, the head would be the embedding.")
    flags = [name for name in NORM_FLAGS if values.get(name)]
    checks.add("norm flags", not flags, ", ".join(flags) or "none", "none", "Training feeds back the pre-norm state.")
    eagle = values.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    same("use_aux_hidden_state", eagle.get("use_aux_hidden_state"), True)
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    same("layer ids", ids, [boundary - 1 for boundary in target.boundaries], "They are boundaries - 1.")
    model_type = target.config.get("model_type", "")
    if model_type.startswith(ONE_BY_FIRST_ID):
        checks.add(
            "layer ids rule",
            isinstance(ids, list) and ids[:1] == [1],
            f"{_plain(ids)} on {model_type}",
            "first id 1",
            "SGLang's class adds 1 to the ids only if the first is 1: capture with target.boundaries that begin with 2.",
        )
    rope = rope_parameters(target.config)
    same("rope_parameters", values.get("rope_parameters"), rope, "Rotary embedding of draft and target must agree.")
    older = {name: values.get(name) for name in ("rope_theta", "rope_scaling")}
    same("rope_theta, rope_scaling", rope_parameters(older), rope, "Older readers take these two.")
    positions = target.config.get("max_position_embeddings", values["max_position_embeddings"])
    checks.add(
        "max_position_embeddings",
        values["max_position_embeddings"] >= positions,
        values["max_position_embeddings"],
        f"at least {positions:,}",
        "Longer prompts would run past the draft's positions.",
    )


def _check_tensors(checks: Checks, tensors: dict[str, torch.Tensor], values: dict, target: Target) -> None:
    config = DraftConfig(**{name: values[name] for name in SHAPE_KEYS}, rope_parameters={}, boundaries=[])
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    expected = {n: (tuple(w.shape), torch.bfloat16) for n, w in Draft(config, device="meta").trained_weights().items()}
    expected |= {"d2t": ((size,), torch.int64), "t2d": ((vocab_size,), torch.bool)}
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected and name != EMBEDDING]
    checks.add("tensors missing", not missing, ", ".join(missing) or "none", "none", "SGLang would leave them random.")
    checks.add("tensors unexpected", not unexpected, ", ".join(unexpected) or "none", "none", "SGLang would skip them.")
    wrong = [
        f"{name} {list(tensors[name].shape)} {tensors[name].dtype} (not {list(shape)} {dtype})"
        for name, (shape, dtype) in expected.items()
        if name in tensors and (tuple(tensors[name].shape), tensors[name].dtype) != (shape, dtype)
    ]
    checks.add("shapes and dtypes", not wrong, ", ".join(wrong) or "as expected")
    infinite = [n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    checks.add("finite values", not infinite, ", ".join(infinite) or "all", "all", "A weight was never loaded.")
    if EMBEDDING in tensors:
        same = torch.equal(tensors[EMBEDDING], target.embedding().to(tensors[EMBEDDING].dtype))
        checks.add("embed_tokens", same, "the target's" if same else "not the target's", "absent, or the target's")
    else:
        checks.add("embed_tokens", True, "left out on purpose", "absent, or the target's")
    if not {"d2t", "t2d"} <= set(tensors) or any(name.startswith(("d2t ", "t2d ")) for name in wrong):
        return
    ids, t2d = torch.arange(size) + tensors["d2t"], tensors["t2d"]
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    offsets = "d2t holds offsets: target id = draft id + d2t[draft id]."
    checks.add("d2t: ids in range", inside, f"{int(ids.min())}..{int(ids.max())}", f"0..{vocab_size - 1}", offsets)
    checks.add(
        "d2t: ids rise", bool((ids.diff() > 0).all()), "strictly" if (ids.diff() > 0).all() else "no", "", offsets
    )
    marked = int(t2d[ids.clamp(0, vocab_size - 1)].sum())
    checks.add("t2d marks the ids", inside and marked == size, f"{marked} of {size}", "all", offsets)
    checks.add("t2d count", int(t2d.sum()) == size, int(t2d.sum()), size)


def _plain(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)
