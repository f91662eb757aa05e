"""The draft: one decoder layer that reads the target's hidden states, with the tensor names that SGLang serves.

The layer's input is cat(input_layernorm(embedding), hidden_norm(hidden)), 2H wide; its residual is the un-normed hidden.
`hidden` is fc(aux) at first and the layer's own output, before the last norm, from then on.

There is no `forward`: training (many rows, training-time test) and decoding (few rows, caches) order the same pieces
differently and bring their own attention. Every piece takes any number of leading dimensions, written [..., H] below.

A new draft holds NaN in every weight until `initialise` or `load_weights`, so a forgotten tensor is loud.
Legend: H hidden, V target vocabulary, D draft vocabulary, N query heads, G key/value heads, E head width.
"""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import nn

from eagle3_helpers.errors import BadParams, CheckRefused
from eagle3_helpers.params import DraftParams
from eagle3_helpers.target import Target

WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DDP and torch.compile put in front of a name
EMBEDDING = "embed_tokens.weight"
INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Everything that decides the draft's shapes and arithmetic."""

    hidden_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict  # as in transformers 5: {"rope_type": ..., "rope_theta": ..., ...}
    max_position_embeddings: int
    boundaries: list[int]  # of the target whose states the draft reads
    hidden_act: str = "silu"

    @classmethod
    def from_params(cls, params: DraftParams, target: Target) -> "DraftConfig":
        """The params' numbers where given, else the target's. A target that is only a shape gives the usual constants.

        Raises BadParams for a draft vocabulary larger than the target's, and for heads that do not divide.
        """
        shape = target.shape
        config = target.config if target.here else {}
        if params.vocab_size > shape.vocab_size:
            raise BadParams(
                f"draft.vocab_size {params.vocab_size:,} is larger than the target's vocabulary of {shape.vocab_size:,}.",
                f"Choose at most {shape.vocab_size:,}; 32,000 is common for large targets.",
            )
        heads = params.num_attention_heads or shape.num_attention_heads
        groups = params.num_key_value_heads or min(shape.num_key_value_heads, heads)
        head_dim = params.head_dim or shape.head_dim
        if heads % groups or head_dim % 2:
            raise BadParams(
                f"a draft with {heads} heads, {groups} key/value heads and head_dim {head_dim} cannot be built.",
                "draft.num_key_value_heads must divide draft.num_attention_heads, and draft.head_dim must be even.",
            )
        return cls(
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            draft_vocab_size=params.vocab_size,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=head_dim,
            intermediate_size=params.intermediate_size or shape.intermediate_size,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_parameters=rope_parameters(config),
            max_position_embeddings=config.get("max_position_embeddings", 4096),
            boundaries=list(target.boundaries),
        )

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "DraftConfig":
        """Raises CheckRefused where names are missing or unknown."""
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckRefused(f"this is not a draft config: {error}.", "Make the plan again.") from error


def rope_parameters(config: dict) -> dict:
    """A target's rotary embedding in the one form of transformers 5; older files have rope_theta and rope_scaling.

    Raises BadParams where the target rotates differently by layer kind: a draft of one layer cannot follow that.
    """
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in given.values()):
        raise BadParams(
            f"the target has rope parameters per layer kind ({', '.join(given)}), which this draft cannot copy.",
            "Use a target with one rotary embedding.",
        )
    given["rope_type"] = given.pop("type", None) or given.get("rope_type") or "default"
    given.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return given


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Norm(nn.Module):
    """x / rms(x) * weight, with the mean square taken in float32 and the result in x's dtype."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.input_layernorm = _Norm(config)
        self.hidden_norm = _Norm(config)
        self.post_attention_layernorm = _Norm(config)
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)


class Draft(nn.Module):
    """The weights and the pieces of the forward pass. `device` may be "meta": shapes without memory."""

    def __init__(self, config: DraftConfig, device: str | torch.device = "cpu"):
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
            self.midlayer = _Layer(config)
            self.norm = _Norm(config)
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            with torch.no_grad():
                for weight in self.parameters():
                    weight.fill_(float("nan"))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] token ids of the target -> [..., H]"""
        return self.embed_tokens(ids)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """[..., 3H] concatenated boundaries -> [..., H], the first hidden of a row."""
        return self.fc(aux)

    def layer_input(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H], [..., H] -> [..., 2H]: what queries, keys and values are made of."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(embeds.to(hidden.dtype)), layer.hidden_norm(hidden)), -1)

    def queries(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[..., 2H], [...] -> [..., N, E], rotated."""
        q = self.midlayer.self_attn.q_proj(inputs).unflatten(-1, (-1, self.config.head_dim))
        return self._rotate(q, positions)

    def keys_values(self, inputs: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., 2H], [...] -> keys [..., G, E], rotated, and values [..., G, E]."""
        attention = self.midlayer.self_attn
        k = attention.k_proj(inputs).unflatten(-1, (-1, self.config.head_dim))
        v = attention.v_proj(inputs).unflatten(-1, (-1, self.config.head_dim))
        return self._rotate(k, positions), v

    def qkv(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """embeds and hidden [..., H], positions [...] -> q [..., N, E], k and v [..., G, E]; q and k rotated."""
        inputs = self.layer_input(embeds, hidden)
        return self.queries(inputs, positions), *self.keys_values(inputs, positions)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The un-normed hidden [..., H] that entered and the heads' output [..., N*E] -> the layer's output [..., H]."""
        layer = self.midlayer
        hidden = hidden + layer.self_attn.o_proj(attended)
        x = layer.post_attention_layernorm(hidden)
        return hidden + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., D]"""
        return self.lm_head(self.norm(hidden))

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., heads, E]; the two halves of E form the pairs, as in Llama."""
        cos, sin = self._rotary(x.new_empty(0, dtype=torch.float32), positions)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        first, second = x.float().chunk(2, -1)
        wide = torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin
        return wide.to(x.dtype)

    @functools.cached_property
    def _rotary(self) -> nn.Module:
        """transformers' own rotary embedding, for every rope type it knows; outside the module tree, always float32."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = self.config
        return LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )

    @torch.no_grad()
    def initialise(self, target: Target, draft_vocab, seed: int) -> "Draft":
        """The weights training starts from; returns the draft.

        Embedding: the target's. lm_head: the target's rows of the draft vocabulary. Last norm: 1 / the mean length of these
        rows, because a normed hidden times a row of length r spreads its logits by about r: the first ones spread by 1, as a
        guess should, not by what the head's scale happens to be. Other norms: 1. The rest: normal, 0.02.
        Raises CheckRefused where the target's tensors do not have the config's shape.
        """
        config = self.config
        embedding, head = target.embedding(), target.head()
        expected = (config.vocab_size, config.hidden_size)
        for name, tensor in (("embedding", embedding), ("head", head)):
            if tuple(tensor.shape) != expected:
                raise CheckRefused(
                    f"the target's {name} is {list(tensor.shape)}, the draft config expects {list(expected)}.",
                    "Does the config belong to these weights?",
                )
        if len(draft_vocab.d2t) != config.draft_vocab_size:
            raise CheckRefused(
                f"the draft vocabulary holds {len(draft_vocab.d2t):,} tokens, the draft config {config.draft_vocab_size:,}.",
                "Make the draft vocabulary and the plan from the same params.",
            )
        generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device starts from the same numbers
        rows = head[draft_vocab.t2d]
        for name, weight in self.named_parameters():
            if name == EMBEDDING:
                weight.copy_(embedding)
            elif name == "lm_head.weight":
                weight.copy_(rows)
            elif name == "norm.weight":
                weight.fill_(1 / rows.float().norm(dim=1).mean())
            elif weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.empty(weight.shape).normal_(0.0, INIT_STD, generator=generator))
        return self._without_nan()

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """Every weight but the embedding, which is the target's, by name."""
        return {name: weight for name, weight in self.state_dict().items() if name != EMBEDDING}

    @torch.no_grad()
    def load_weights(self, weights: dict[str, torch.Tensor], embedding: torch.Tensor | None = None) -> "Draft":
        """Copies `weights` (and `embedding` [V, H] where `weights` lacks it) into the draft; returns it.

        Prefixes that wrappers add are stripped. Raises CheckRefused listing any other missing, unexpected or misshapen name.
        """
        given = {_bare(name): tensor for name, tensor in weights.items()}
        if embedding is not None:
            given.setdefault(EMBEDDING, embedding)
        own = self.state_dict()
        wrong = [f"missing {name}" for name in own if name not in given]
        wrong += [f"unexpected {name}" for name in given if name not in own]
        wrong += [
            f"{name} is {list(given[name].shape)}, not {list(own[name].shape)}"
            for name in own
            if name in given and given[name].shape != own[name].shape
        ]
        if wrong:
            raise CheckRefused(
                f"these weights do not fit the draft: {'; '.join(wrong)}.", "Are they of this draft config?"
            )
        for name, tensor in own.items():
            tensor.copy_(given[name])
        return self._without_nan()

    def _without_nan(self) -> "Draft":
        bad = [name for name, weight in self.named_parameters() if weight.isnan().any()]
        if bad:
            raise CheckRefused(f"NaN in {', '.join(bad)}.", "Every weight must be loaded or initialised.")
        return self


def _bare(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.removeprefix(WRAPPERS[0]).removeprefix(WRAPPERS[1])
    return name
