"""The target model's folder: its shape, identity, tokenizer and the few tensors the draft needs, read without loading it.

Boundaries: h_k is the residual stream entering layer k, in the numbering of Hugging Face's `hidden_states[k]`
(h_0 is the embedding's output). The default [2, N//2, N-3] is what SGLang captures for a draft that names no layers.
"""

import functools
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eagle3_helpers.durable import digest, file_digest, read_json, write_json
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.params import TargetParams, TargetShape, home, one_line, resolve

EMBEDDING_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight", "language_model.model.embed_tokens.weight")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
FINAL_NORM_NAMES = ("model.norm.weight", "norm.weight", "language_model.model.norm.weight")
DERIVED_SIZES = ("num_key_value_heads", "head_dim")  # follow from others where config.json leaves them out
# Never read when the target is used: documents, pictures, and weights in other layouts than the one that is loaded.
DOCUMENTS = (".", "readme", "license")  # beginnings of names; a dot begins .gitattributes and the like
UNREAD_SUFFIXES = {
    *(".md", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp"),
    *(".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
}
OWN_NOTE = "unpacked.json"  # written by the demo when it unpacks its target


def _memory_file() -> Path:
    return home() / "outputs" / "cache" / "weight_digests.json"


def _memory() -> dict:
    noted = read_json(_memory_file())
    return noted if isinstance(noted, dict) else {}


def _memory_key(file: Path) -> str:
    stat = file.stat()
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _remembered(file: Path) -> str | None:
    return _memory().get(_memory_key(file))


def _remembered_digest(file: Path) -> str:
    """sha256 of a weight file, computed once for a path, size and time of change: a target can be a terabyte."""
    known = _remembered(file)
    if known is None:
        known = file_digest(file)
        write_json(_memory_file(), {**_memory(), _memory_key(file): known})
    return known


def _decides(file: Path) -> bool:
    """Whether a file beside the weights may decide ids, masks or states: every one that is not known to be never read."""
    name = file.name.lower()
    unread = name.startswith(DOCUMENTS) or name == OWN_NOTE or file.suffix.lower() in UNREAD_SUFFIXES
    return file.is_file() and not unread and file.suffix != ".safetensors"


def _read_object(file: Path) -> dict:
    """A JSON object. Raises BadParams where the file holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it holds {type(value).__name__}, not named values")
    except ValueError as error:
        raise BadParams(f"{file} is damaged: {one_line(error)}.", "Fetch that file of the model again.") from error
    return value


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
        """config.json; of a model that wraps a language model, the part of that one. Needs no weights.

        Raises BadParams where it is absent or damaged.
        """
        if not self.here:
            self.require()
        config = _read_object(self.folder / "config.json")
        inner = config.get("text_config")
        return {**config, **inner} if isinstance(inner, dict) else config

    @functools.cached_property
    def shape(self) -> TargetShape:
        """Sizes, all counts. Raises BadParams naming what config.json lacks, or what no model can be."""
        if not self.here and self.params.shape is not None:
            return self.params.shape
        file, given = self.folder / "config.json", {}
        for name in TargetShape.model_fields:
            if self.config.get(name) is not None:
                given[name] = self.config[name]
        absent = [name for name in TargetShape.model_fields if name not in given and name not in DERIVED_SIZES]
        if absent:
            raise BadParams(
                f"{file} does not say {', '.join(absent)}.",
                "Use a decoder whose config.json has these names, or mend the file if it was cut.",
            )
        try:
            heads, width = given["num_attention_heads"], given["hidden_size"]
            return TargetShape(**{"num_key_value_heads": heads, "head_dim": width // heads, **given})
        except (TypeError, ZeroDivisionError, ValueError) as error:
            sizes = ", ".join(f"{name} = {value!r}" for name, value in given.items())
            raise BadParams(
                f"{file} has sizes that no model has: {sizes}.", "Each is a whole number above zero; mend the file."
            ) from error

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
        """sha256 of everything that decides ids, masks and states: {"files": {name: ...}, "weights": {name: ...}}."""
        return {
            "files": self.file_digests,
            "weights": {file.name: _remembered_digest(file) for file in self.weight_files()},
        }

    @property
    def known_identity(self) -> dict | None:
        """`identity`, or None where that would read weights whose digest is not remembered yet."""
        self.require()
        return self.identity if all(_remembered(file) for file in self.weight_files()) else None

    @functools.cached_property
    def file_digests(self) -> dict[str, str]:
        """sha256 of the files beside the weights, by name: settings, stop ids, tokenizer, templates and code.

        All count but the few kinds that nothing reads, so that a kind not thought of makes a difference and not an error.
        """
        self.require()
        templates = self.folder.glob("additional_chat_templates/*.jinja")
        found = {str(file.relative_to(self.folder)): file for file in (*self.folder.iterdir(), *templates)}
        return {name: file_digest(found[name]) for name in sorted(found) if _decides(found[name])}

    @property
    def tokenizer_digest(self) -> str:
        """Of all files beside the weights: a tokenizer reads config.json and code too, and which ones is its own affair."""
        return digest(self.file_digests)

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
                f"the tokenizer in {self.folder} does not load: {one_line(error)[:300]}.",
                "Check the tokenizer files; a model with code of its own needs target.trust_remote_code: true.",
            ) from error
        if not tokenizer.chat_template:
            raise BadParams(
                f"the tokenizer in {self.folder} has no chat template.", "Add chat_template.jinja to that folder."
            )
        return tokenizer

    @functools.cached_property
    def stop_ids(self) -> list[int]:
        """Token ids that end a turn: those of generation_config.json and the tokenizer's own. Raises BadParams without any."""
        path = self.folder / "generation_config.json"
        declared = _read_object(path).get("eos_token_id") if path.is_file() else None
        if declared is None:
            path, declared = self.folder / "config.json", self.config.get("eos_token_id")
        named = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if any(type(token) is not int for token in named):
            raise BadParams(f"{path}: eos_token_id = {declared!r} is no token id.", "Write one id, or a list of ids.")
        own = self.tokenizer.eos_token_id
        if not named and own is None:
            raise BadParams(f"nothing in {self.folder} names a token that ends a turn.", f"Add eos_token_id to {path}.")
        return sorted({*named, *([] if own is None else [own])})

    def tensor(self, names: tuple[str, ...]) -> torch.Tensor:
        """The first of `names` that the weight files hold.

        Raises CheckRefused for a damaged file, and naming the keys that are there where none of `names` is.
        """
        seen: list[str] = []
        for file in self.weight_files():
            try:
                with safe_open(file, "pt") as weights:
                    keys = list(weights.keys())
                    for name in names:
                        if name in keys:
                            return weights.get_tensor(name)
            except SafetensorError as error:
                raise CheckRefused(
                    f"{file} is damaged: {one_line(error)}.", "Fetch that file of the model again."
                ) from error
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

        Raises CheckRefused where the folder does not load, and where the files lack a weight (transformers would fill it
        with random numbers and go on).
        """
        from transformers import AutoModelForCausalLM

        self.require()
        try:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                self.folder,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=self.params.trust_remote_code,
                use_safetensors=True,  # the files whose digests are the identity
                output_loading_info=True,
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckRefused(
                f"the model in {self.folder} does not load: {one_line(error)[:300]}.",
                "Check its files; a model with code of its own needs target.trust_remote_code: true.",
            ) from error
        if missing := sorted(loaded["missing_keys"]):
            raise CheckRefused(
                f"{self.folder} lacks {len(missing)} weights of this architecture, e.g. {', '.join(missing[:3])}.",
                "Complete the model folder; a target with random layers has no states worth keeping.",
            )
        return model.to(device).eval()
