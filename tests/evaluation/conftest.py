"""One tiny target in float32, its samples, and drafts: as training starts from, and one that learned its answers by heart."""

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from eagle3_helpers.draft.model import Draft, DraftConfig
from eagle3_helpers.evaluation.lossless import greedy
from eagle3_helpers.params import Params, load_params, resolve
from eagle3_helpers.samples.table import SampleTable, build_samples
from eagle3_helpers.samples.vocab import DraftVocab, choose_draft_vocab
from eagle3_helpers.target import Target
from tests.makers import make_home


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@dataclasses.dataclass
class Tiny:
    params: Params
    target: Target
    model: torch.nn.Module
    samples: SampleTable
    draft_vocab: DraftVocab  # all of the target's tokens
    prompts: list[list[int]]  # token ids, of five lengths
    answers: list[list[int]]  # the target's greedy ones, 24 tokens each

    def make_draft(self, seed: int = 0) -> Draft:
        """A draft as training starts from, but with an fc that lets the states through."""
        config = DraftConfig.from_params(
            self.params.draft.model_copy(update={"vocab_size": self.draft_vocab.size}), self.target
        )
        draft = Draft(config).initialise(self.target, self.draft_vocab, seed)
        with torch.no_grad():
            draft.fc.weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))
        return draft.eval()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    params = load_params(str(make_home(tmp_path_factory.mktemp("tiny"))))
    target = Target(params.target)
    model = target.load_model("float32", "cpu")
    samples = build_samples(params, target, resolve(params.samples.conversations))
    draft_vocab = choose_draft_vocab(samples, target.shape.vocab_size, target)
    prompts = [list(range(5, 5 + length)) for length in (3, 17, 9, 24, 2)]
    answers = greedy(model, prompts, answer_tokens=24, stop_ids=[383])
    return Tiny(params, target, model, samples, draft_vocab, prompts, answers)


def draft_rows(draft: Draft, ids: torch.Tensor, aux: torch.Tensor, hidden=None, fed=None) -> torch.Tensor:
    """States [1, R, H] of the true rows 0..R-1 (row t: x_{t+1}, a_t) and of chain rows behind them, without any cache.

    ids [1, R+1]; aux [1, R, 3H]; `hidden` [1, C, H] and `fed` [1, C]: what the chain rows get.
    """
    rows, states = ids[:, 1:], draft.fuse(aux)
    if fed is not None:
        rows, states = torch.cat([rows, fed], 1), torch.cat([states, hidden], 1)
    q, k, v = draft.qkv(draft.embed(rows), states, torch.arange(rows.shape[1])[None])
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return draft.finish(states, attended.transpose(1, 2).flatten(2))


def true_aux(tiny: Tiny, ids: torch.Tensor) -> torch.Tensor:
    """[1, L, 3H] for ids [1, L]"""
    with torch.no_grad():
        states = tiny.model(input_ids=ids, output_hidden_states=True).hidden_states
    return torch.cat([states[k] for k in tiny.target.boundaries], -1)


@pytest.fixture(scope="session")
def taught(tiny) -> Draft:
    """A draft that was shown the answers to tiny.prompts a few times: some of its tokens are accepted, not all."""
    draft = tiny.make_draft(seed=3).train()
    draft.embed_tokens.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], 0.01)
    texts = [torch.tensor([p + a]) for p, a in zip(tiny.prompts, tiny.answers, strict=True)]
    states = [true_aux(tiny, ids) for ids in texts]
    for _ in range(25):
        for ids, aux in zip(texts, states, strict=True):
            logits = draft.logits(draft_rows(draft, ids[:, :-1], aux[:, :-2]))
            cross_entropy(logits[0], ids[0, 2:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft.eval()
