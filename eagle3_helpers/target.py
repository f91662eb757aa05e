"""The target model's folder: its shape, identity, tokenizer and the few tensors the draft needs, read without loading it.

Boundaries: h_k is the residual stream entering layer k, in the numbering of Hugging Face's `hidden_states[k]`
(h_0 is the embedding's output). The default [2, N//2, N-3] is what SGLang captures for a draft that names no layers.
"""

import dataclasses
import functools
import json
from pathlib import Path

import torch
from safetensors import safe_open

from eagle3_helpers.durable import digest, file_digest, read_json, write_json
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.params import TargetParams, home, resolve

EMBEDDING_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight", "language_model.model.embed_tokens.weight")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
FINAL_NORM_NAMES = ("model.norm.weight", "norm.weight", "language_model.model.norm.weight")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
)


def _memory_file() -> Path:
    return home() / "outputs" / "cache" / "weight_digests.json"


def _memory_key(file: Path) -> str:
    stat = file.stat()
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _remembered(file: Path) -> str | None:
    return (read_json(_memory_file()) or {}).get(_memory_key(file))


def _remembered_digest(file: Path) -> str:
    """sha256 of a weight file, computed once for a path, size and time of change: a target can be a terabyte."""
    known = _remembered(file)
    if known is None:
        known = file_digest(file)
        write_json(_memory_file(), {**(read_json(_memory_file()) or {}), _memory_key(file): known})
    return known


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a target, all counts."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int


class Target:
    """A model folder in Hugging Face layout. Nothing is loaded until asked for."""

    def __init__(self, params: TargetParams):
        self.params = params
        self.folder = resolve(params.path)

    @property
    def here(self) -> bool:
        return (self.folder / "config.json").is_file()

    def require(self) -> None:
        """Raises BadParams where the folder holds no model."""
        if not self.folder.is_dir():
            raise BadParams(
                f"target.path {self.folder} does not exist.", "Give the folder of a model in Hugging Face layout."
            )
        if not self.here:
            raise BadParams(
                f"target.path {self.folder} holds no config.json.", "Give the folder of a model in Hugging Face layout."
            )
        if not self.weight_files():
            raise BadParams(f"target.path {self.folder} holds no *.safetensors.", "Convert the weights to safetensors.")

    @functools.cached_property
    def config(self) -> dict:
        """config.json; of a model that wraps a language model, the part of that one."""
        self.require()
        config = json.loads((self.folder / "config.json").read_text())
        return {**config, **config["text_config"]} if "text_config" in config else config

    @functools.cached_property
    def shape(self) -> Shape:
        if not self.here and self.params.shape is not None:
            return Shape(**self.params.shape.model_dump())
        config = self.config
        heads = config["num_attention_heads"]
        return Shape(
            hidden_size=config["hidden_size"],
            num_hidden_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
        )

    @functools.cached_property
    def boundaries(self) -> list[int]:
        """The captured h_k. Raises BadParams unless they rise strictly inside 0..N-1."""
        layers = self.shape.num_hidden_layers
        chosen = self.params.boundaries
        ids = chosen if chosen is not None else [2, layers // 2, layers - 3]
        if ids != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] > layers - 1:
            origin = (
                "target.boundaries"
                if chosen is not None
                else f"the default boundaries of a target with {layers} layers,"
            )
            raise BadParams(
                f"{origin} {ids} do not rise strictly inside 0..{layers - 1}.",
                "Set target.boundaries to layers of this target, e.g. "
                f"{sorted({1, layers // 2, layers - 1})} (the default [2, N//2, N-3] needs at least 7 layers).",
            )
        if len(ids) != 3:
            raise BadParams(f"target.boundaries {ids} are {len(ids)}; EAGLE-3 concatenates 3.", "Name three.")
        return ids

    @property
    def bytes_per_token(self) -> int:
        """Of stored states: three boundaries and the last state."""
        return 4 * self.shape.hidden_size * torch.finfo(self.torch_dtype).bits // 8

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.params.dtype)

    def weight_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    @functools.cached_property
    def identity(self) -> dict:
        """Digests of everything that decides the states: config, weights, tokenizer files and template text."""
        self.require()
        return {
            "config": file_digest(self.folder / "config.json"),
            "weights": {file.name: _remembered_digest(file) for file in self.weight_files()},
            "tokenizer": self.tokenizer_digest,
        }

    @property
    def known_identity(self) -> dict | None:
        """`identity`, or None where that would read weights whose digest is not remembered yet."""
        self.require()
        return self.identity if all(_remembered(file) for file in self.weight_files()) else None

    @functools.cached_property
    def tokenizer_digest(self) -> str:
        self.require()
        files = [*(self.folder / name for name in TOKENIZER_FILES), *sorted(self.folder.glob("*.jinja"))]
        return digest({file.name: file_digest(file) for file in files if file.is_file()})

    @functools.cached_property
    def tokenizer(self):
        """The tokenizer. Raises BadParams without a chat template, before any weights are loaded."""
        from transformers import AutoTokenizer

        self.require()
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=self.params.trust_remote_code
            )
        except Exception as error:
            raise BadParams(
                f"the tokenizer in {self.folder} does not load: {str(error).splitlines()[0]}",
                "Check the tokenizer files; a model with code of its own needs target.trust_remote_code: true.",
            ) from error
        if not tokenizer.chat_template:
            raise BadParams(
                f"the tokenizer in {self.folder} has no chat template.", "Add chat_template.jinja to that folder."
            )
        return tokenizer

    @functools.cached_property
    def stop_ids(self) -> list[int]:
        """Token ids that end a turn: those of generation_config.json and the tokenizer's own."""
        found = set()
        path = self.folder / "generation_config.json"
        declared = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        declared = declared if declared is not None else self.config.get("eos_token_id")
        found.update(declared if isinstance(declared, list) else [declared])
        found.add(self.tokenizer.eos_token_id)
        return sorted(token for token in found if token is not None)

    def tensor(self, names: tuple[str, ...]) -> torch.Tensor:
        """The first of `names` that the weight files hold. Raises CheckRefused naming the keys that are there."""
        seen: list[str] = []
        for file in self.weight_files():
            with safe_open(file, "pt") as weights:
                keys = list(weights.keys())
                for name in names:
                    if name in keys:
                        return weights.get_tensor(name)
                seen += keys
        raise CheckRefused(
            f"{self.folder} holds none of {', '.join(names)}; it holds {len(seen)} tensors, e.g. {', '.join(seen[:4])}.",
            "Is this the whole model, in Hugging Face naming?",
        )

    def embedding(self) -> torch.Tensor:
        """[V, H]"""
        return self.tensor(EMBEDDING_NAMES)

    def head(self) -> torch.Tensor:
        """[V, H]: lm_head, or the embedding where the two are tied."""
        return self.embedding() if self.config.get("tie_word_embeddings") else self.tensor(HEAD_NAMES)

    def final_norm(self) -> torch.Tensor:
        """[H]"""
        return self.tensor(FINAL_NORM_NAMES)

    def load_model(self, dtype: str, device: str):
        """The whole target with its head, for capture, generation and verification.

        Raises CheckRefused where the files lack a weight (transformers would fill it with random numbers and go on).
        """
        from transformers import AutoModelForCausalLM

        self.require()
        model, loaded = AutoModelForCausalLM.from_pretrained(
            self.folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=self.params.trust_remote_code,
            output_loading_info=True,
        )
        if missing := sorted(loaded["missing_keys"]):
            raise CheckRefused(
                f"{self.folder} lacks {len(missing)} weights of this architecture, e.g. {', '.join(missing[:3])}.",
                "Complete the model folder; a target with random layers has no states worth keeping.",
            )
        return model.to(device).eval()
