"""Makes the small things that tests need: a tiny random target, conversations, prompts, and a params file over them.

The target is a real Llama in Hugging Face layout (8 layers, hidden 32) with a real byte-level tokenizer and a ChatML
template; only its weights mean nothing.
"""

import json
from pathlib import Path

import torch
import yaml

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOPICS = ["rivers", "bread", "clocks", "bridges", "foxes", "maps", "tea", "glass", "wind", "boats", "salt", "paper"]


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"user assistant system tell me about {topic}" for topic in TOPICS], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    )
    wrapped.chat_template = CHATML
    return wrapped


def make_target(folder: Path, layers: int = 8, seed: int = 0, tied: bool = False, **config) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    settings = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 384,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **config})).to(torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def teach_target(folder: Path, conversations: Path, steps: int = 120) -> Path:
    """Trains the tiny target on the conversations until it says much the same, so that a draft can learn from it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [json.loads(line)["messages"] for line in conversations.read_text().splitlines()]
    batch = tokenizer.apply_chat_template(rows, tokenize=True, return_dict=True, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def make_conversations(path: Path, count: int = 24, multi_turn_every: int = 4) -> Path:
    """`count` different conversations; every fourth has two assistant turns."""
    rows = []
    for number in range(count):
        topic = TOPICS[number % len(TOPICS)]
        messages = [
            {"role": "user", "content": f"tell me about {topic} number {number}"},
            {
                "role": "assistant",
                "content": f"{topic} are {topic}, and {number} of them are {topic} too" * (1 + number % 3),
            },
        ]
        if number % multi_turn_every == 0:
            messages += [{"role": "user", "content": "more"}, {"role": "assistant", "content": f"no more {topic}"}]
        rows.append({"id": f"c{number}", "messages": messages})
    return write_jsonl(path, rows)


def make_prompts(path: Path, count: int = 6) -> Path:
    rows = [
        {"question_id": number, "category": "abc"[number % 3], "turns": [f"say something about {TOPICS[number]} now"]}
        for number in range(count)
    ]
    return write_jsonl(path, rows)


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def params_values(home: Path, **sections) -> dict:
    """Params of a tiny run whose target, data, prompts and store lie under `home`; sections are merged in."""
    values = {
        "run_id": "tiny",
        "target": {"path": str(home / "target"), "dtype": "float32"},
        "samples": {"conversations": str(home / "conversations.jsonl"), "max_length": 200},
        "capture": {"batch_tokens": 600},
        "store": {"data_root": str(home / "data"), "name": "tiny", "reserve_gb": 0.01},
        "draft": {"vocab_size": 128},
        "training": {
            "compute_dtype": "float32",
            "ttt_steps": 3,
            "lr": 0.003,
            "epochs": 2,
            "samples_per_step": 4,
            "held_out_fraction": 0.15,
            "evaluate_every": 4,
            "checkpoint_every": 3,
        },
        "evaluation": {
            "prompts": str(home / "prompts.jsonl"),
            "answer_tokens": 12,
            "draft_tokens": 3,
            "dtype": "float32",
        },
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section} if isinstance(section, dict) else section
    return values


def make_home(home: Path, **sections) -> Path:
    """Everything a tiny run needs under `home`; returns the params file."""
    (home / "data").mkdir(parents=True, exist_ok=True)
    make_target(home / "target")
    make_conversations(home / "conversations.jsonl")
    make_prompts(home / "prompts.jsonl")
    path = home / "params" / "tiny.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(params_values(home, **sections), sort_keys=False))
    return path
