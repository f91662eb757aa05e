from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from eagle3_helpers.draft.model import Draft, DraftConfig, rope_parameters
from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.params import DraftParams, TargetParams, TargetShape
from eagle3_helpers.target import Target
from tests.makers import make_target
from tests.training.tiny import CONFIG, tiny_draft

SERVED_NAMES = {
    "embed_tokens.weight",
    "fc.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "norm.weight",
    "lm_head.weight",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return Target(TargetParams(path=str(make_target(tmp_path_factory.mktemp("target") / "tiny")), dtype="float32"))


@pytest.fixture
def vocab():
    t2d = torch.zeros(384, dtype=torch.bool)
    t2d[1:257:2] = True
    return SimpleNamespace(d2t=t2d.nonzero().flatten() - torch.arange(128), t2d=t2d)


@pytest.fixture
def config(target) -> DraftConfig:
    return DraftConfig.from_params(DraftParams(vocab_size=128), target)


def test_names_and_shapes_are_those_that_sglang_serves(config):
    shapes = {name: tuple(weight.shape) for name, weight in Draft(config, "meta").named_parameters()}
    assert set(shapes) == SERVED_NAMES
    assert shapes["midlayer.self_attn.q_proj.weight"] == (32, 64)
    assert shapes["midlayer.self_attn.k_proj.weight"] == (16, 64)
    assert shapes["fc.weight"] == (32, 96)
    assert shapes["lm_head.weight"] == (128, 32)
    assert shapes["embed_tokens.weight"] == (384, 32)


def test_a_new_draft_is_nan_everywhere_until_it_is_initialised(config, target, vocab):
    draft = Draft(config)
    assert all(weight.isnan().all() for weight in draft.parameters())
    draft.initialise(target, vocab, seed=0)
    assert all(weight.isfinite().all() for weight in draft.parameters())
    assert torch.equal(draft.embed_tokens.weight, target.embedding())
    assert torch.equal(draft.lm_head.weight, target.head()[vocab.t2d])
    norms = {name: weight for name, weight in draft.named_parameters() if weight.ndim == 1 and name != "norm.weight"}
    assert len(norms) == 3 and all((weight == 1).all() for weight in norms.values())


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_the_first_logits_spread_by_one_whatever_the_scale_of_the_head(config, target, vocab, scale):
    scaled = SimpleNamespace(embedding=target.embedding, head=lambda: scale * target.head())
    draft = Draft(config).initialise(scaled, vocab, seed=0)
    rows = scale * target.head()[vocab.t2d]
    assert torch.allclose(draft.norm.weight, 1 / rows.norm(dim=1).mean() * torch.ones(32))
    hidden = torch.randn(500, 32, generator=torch.Generator().manual_seed(2))
    assert 0.9 < draft.logits(hidden).std() < 1.15


def test_the_first_weights_depend_on_the_seed_alone(config, target, vocab):
    one, same, other = (Draft(config).initialise(target, vocab, seed).fc.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_initialising_with_a_vocabulary_of_another_size_is_refused(config, target, vocab):
    with pytest.raises(CheckRefused, match=r"holds 3 tokens, the draft config 128"):
        Draft(config).initialise(target, SimpleNamespace(d2t=vocab.d2t[:3], t2d=vocab.t2d), 0)


def test_the_layer_equals_the_plain_formula_for_any_leading_dimensions():
    draft, config = tiny_draft(), CONFIG
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (2, 5), generator=generator)
    aux = torch.randn(2, 5, 3 * config.hidden_size, generator=generator)
    positions = torch.arange(5).expand(2, 5)
    hidden = draft.fuse(aux)
    q, k, v = draft.qkv(draft.embed(ids), hidden, positions)
    assert q.shape == (2, 5, 4, 8) and k.shape == v.shape == (2, 5, 2, 8)
    for row in range(2):  # a batch is its rows
        flat = draft.qkv(draft.embed(ids[row]), hidden[row], positions[row])
        assert all(torch.allclose(one[row], other, atol=1e-6) for one, other in zip((q, k, v), flat, strict=True))
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    ours = draft.finish(hidden, attended.transpose(1, 2).flatten(-2))
    assert torch.allclose(ours, transformers_layer(draft, ids, hidden), atol=1e-4)
    assert draft.logits(ours).shape == (2, 5, config.draft_vocab_size)


def transformers_layer(draft: Draft, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """transformers' own Llama layer with our weights; only its input is widened to 2H."""
    c = draft.config
    config = LlamaConfig(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=c.rope_parameters,
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0)
    for name in "qkvo":
        linear = getattr(draft.midlayer.self_attn, f"{name}_proj")
        setattr(layer.self_attn, f"{name}_proj", linear)
    layer.mlp.load_state_dict(draft.midlayer.mlp.state_dict())
    layer.post_attention_layernorm.load_state_dict(draft.midlayer.post_attention_layernorm.state_dict())
    wide = draft.layer_input(draft.embed(ids), hidden)
    rotary = LlamaRotaryEmbedding(config)(hidden, torch.arange(hidden.shape[1])[None])
    future = torch.full((hidden.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    after = hidden + layer.self_attn(wide, position_embeddings=rotary, attention_mask=future)[0]
    return after + layer.mlp(layer.post_attention_layernorm(after))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 50000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotation_keeps_relative_positions_for_every_kind_of_rope(rope):
    draft = Draft(DraftConfig(**{**CONFIG.to_dict(), "rope_parameters": rope}))
    draft.load_weights(tiny_draft().state_dict())
    inputs = torch.randn(1, 2 * CONFIG.hidden_size, generator=torch.Generator().manual_seed(0)).expand(2, -1)
    scores = []
    for shift in (0, 40):
        q = draft.queries(inputs, torch.tensor([0, 3]) + shift)
        k, _ = draft.keys_values(inputs, torch.tensor([0, 3]) + shift)
        scores.append((q[1, :2] * k[0]).sum(-1))
    assert torch.allclose(*scores, atol=1e-3)
    turned = draft.queries(inputs, torch.tensor([0, 3]))
    assert not torch.allclose(turned[0], turned[1], atol=1e-3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 1e5}, {"rope_type": "default", "rope_theta": 1e5}),
        ({"rope_theta": 1e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e5}),
        (
            {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 32.0}},
            {"rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
    ],
)
def test_old_and_new_spellings_of_rope_become_one(config, expected):
    assert rope_parameters(config) == expected


def test_rope_by_layer_kind_is_refused():
    with pytest.raises(BadParams, match="full_attention"):
        rope_parameters({"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {}}})


def test_a_target_that_is_only_a_shape_gives_a_config():
    shape = TargetShape(
        hidden_size=64,
        num_hidden_layers=12,
        vocab_size=500,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=96,
    )
    config = DraftConfig.from_params(
        DraftParams(vocab_size=100, num_key_value_heads=2), Target(TargetParams(path="/nowhere", shape=shape))
    )
    assert config.boundaries == [2, 6, 9]
    assert (config.rms_norm_eps, config.max_position_embeddings, config.num_key_value_heads) == (1e-6, 4096, 2)
    assert DraftConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"vocab_size": 385}, "385 is larger than the target's vocabulary of 384"),
        ({"vocab_size": 128, "num_attention_heads": 6, "num_key_value_heads": 4}, "6 heads, 4 key/value heads"),
        ({"vocab_size": 128, "head_dim": 7}, "head_dim 7"),
    ],
)
def test_shapes_that_cannot_be_are_refused_with_their_numbers(target, params, words):
    with pytest.raises(BadParams, match=words):
        DraftConfig.from_params(DraftParams(**params), target)


def test_wrapper_prefixes_are_stripped_and_the_embedding_may_come_from_the_target():
    draft = tiny_draft()
    wrapped = {f"module._orig_mod.{name}": weight for name, weight in draft.trained_weights().items()}
    again = Draft(CONFIG).load_weights(wrapped, embedding=draft.embed_tokens.weight)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in draft.state_dict().items())


def test_missing_unexpected_and_misshapen_weights_are_all_listed():
    weights = tiny_draft().state_dict()
    weights["lm_haed.weight"] = weights.pop("lm_head.weight")
    weights["norm.weight"] = weights["norm.weight"][:-1]
    with pytest.raises(CheckRefused) as refused:
        Draft(CONFIG).load_weights(weights)
    for words in ("missing lm_head.weight", "unexpected lm_haed.weight", "norm.weight is [15], not [16]"):
        assert words in str(refused.value)


def test_weights_with_nan_are_not_taken():
    weights = tiny_draft().state_dict()
    weights["fc.weight"] = torch.full_like(weights["fc.weight"], float("nan"))
    with pytest.raises(CheckRefused, match=r"NaN in fc\.weight"):
        Draft(CONFIG).load_weights(weights)
