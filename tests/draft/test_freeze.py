import json

import pytest
import torch

from eagle3_helpers.draft.freeze import apply_policy, certify, freeze_table, frozen_digests
from eagle3_helpers.draft.model import DraftConfig
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.params import DraftParams
from tests.training.tiny import CONFIG, DRAFT_VOCAB, graded, tiny_document, tiny_draft

KIMI = DraftConfig(
    hidden_size=7168,
    vocab_size=163840,
    draft_vocab_size=32000,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    intermediate_size=18432,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    max_position_embeddings=4096,
    boundaries=[2, 30, 58],
)
GQA = DraftConfig(**{**KIMI.to_dict(), "num_key_value_heads": 8})


def test_the_kimi_shape_has_the_published_counts():
    table = freeze_table(KIMI, DraftParams(expect_trainable=1_190_948_864, expect_frozen=1_174_405_120))
    assert (table.trainable, table.frozen) == (1_190_948_864, 1_174_405_120)
    assert freeze_table(GQA, DraftParams()).trainable == 985_427_968
    head_frozen = freeze_table(KIMI, DraftParams(freeze_lm_head=True))
    assert head_frozen.trainable == 1_190_948_864 - 32000 * 7168
    assert head_frozen.frozen == 1_174_405_120 + 32000 * 7168
    assert table.memory == {
        "weights": 4 * (1_190_948_864 + 1_174_405_120),
        "gradients": 4 * 1_190_948_864,
        "moments": 8 * 1_190_948_864,
    }


@pytest.mark.parametrize(("field", "kind"), [("expect_trainable", "trainable"), ("expect_frozen", "frozen")])
def test_another_total_than_expected_is_refused_with_both_numbers(field, kind):
    with pytest.raises(CheckRefused) as refused:
        freeze_table(KIMI, DraftParams(**{field: 1_000}))
    found = {"trainable": "1,190,948,864", "frozen": "1,174,405,120"}[kind]
    assert f"{found} parameters are {kind}, draft.{field} says 1,000" in str(refused.value)


def test_every_tensor_has_a_row_and_only_what_trains_is_in_the_optimizer(tmp_path):
    table = freeze_table(CONFIG, DraftParams(vocab_size=DRAFT_VOCAB))
    assert {row.tensor for row in table.rows} == set(tiny_draft().state_dict())
    assert [row.tensor for row in table.rows if not row.trainable] == ["embed_tokens.weight"]
    assert all(row.in_optimizer == row.trainable and row.count > 0 and row.why for row in table.rows)
    origins = {row.tensor: row.origin for row in table.rows}
    assert origins["embed_tokens.weight"] == "target" and origins["lm_head.weight"] == "target rows"
    assert origins["fc.weight"] == "random" and origins["midlayer.hidden_norm.weight"] == "ones"
    assert origins["norm.weight"] == "1 / head row norm"
    table.save(tmp_path)
    assert json.loads((tmp_path / "freeze_table.json").read_text()) == table.to_dict()
    assert "FROZEN" in (tmp_path / "freeze_table.html").read_text()
    assert f"trainable {table.trainable:,}; frozen {table.frozen:,}" in repr(table)


def backward(draft) -> None:
    graded(draft, [tiny_document("a", 12, 3), tiny_document("b", 9, 1)]).total.backward()


def failed(checks) -> list[str]:
    return [item["check"] for item in checks.items if not item["ok"]]


@pytest.mark.parametrize("freeze_lm_head", [False, True])
def test_a_sound_draft_is_certified_and_left_as_it_was(freeze_lm_head):
    draft = apply_policy(tiny_draft(), freeze_lm_head)
    before = {name: weight.clone() for name, weight in draft.state_dict().items()}
    checks = certify(draft, backward)
    assert checks.ok, checks
    assert all(torch.equal(weight, before[name]) for name, weight in draft.state_dict().items())
    assert all(weight.grad is None for weight in draft.parameters())


def test_a_frozen_tensor_that_gets_a_gradient_is_caught():
    def leaking(draft):
        backward(draft)
        draft.embed_tokens.weight.grad = torch.zeros_like(draft.embed_tokens.weight)

    checks = certify(apply_policy(tiny_draft(), False), leaking)
    assert failed(checks) == ["frozen tensors with a gradient"]
    with pytest.raises(CheckRefused, match="embed_tokens"):
        checks.require()


def test_a_frozen_tensor_that_changes_is_caught_by_its_hash():
    def writing(draft):
        backward(draft)
        with torch.no_grad():
            draft.embed_tokens.weight[0, 0] += 1e-6

    assert failed(certify(apply_policy(tiny_draft(), False), writing)) == [
        "frozen tensors that an optimizer step changed"
    ]


def test_a_trainable_tensor_without_gradient_with_zero_or_with_nan_is_caught():
    def partly(draft):
        backward(draft)
        draft.fc.weight.grad = None
        draft.norm.weight.grad.zero_()
        draft.midlayer.mlp.up_proj.weight.grad[0, 0] = float("nan")

    checks = certify(apply_policy(tiny_draft(), False), partly)
    observed = {item["check"]: item["observed"] for item in checks.items}
    assert observed["trainable tensors without a gradient"] == "fc.weight"
    assert observed["gradients that are zero"] == "norm.weight"
    assert observed["gradients with NaN or inf"] == "midlayer.mlp.up_proj.weight"
    assert not checks.ok


def test_digests_name_exactly_the_frozen_tensors_and_see_one_bit():
    draft = apply_policy(tiny_draft(), True)
    before = frozen_digests(draft)
    assert set(before) == {"embed_tokens.weight", "lm_head.weight"}
    with torch.no_grad():
        draft.lm_head.weight[0, 0] = torch.nextafter(draft.lm_head.weight[0, 0], torch.tensor(9.0))
    after = frozen_digests(draft)
    assert after["embed_tokens.weight"] == before["embed_tokens.weight"]
    assert after["lm_head.weight"] != before["lm_head.weight"]
