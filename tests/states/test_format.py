import pytest
import torch

from eagle3_helpers.durable import write_bytes
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.states.format import Damage, State, check_state, decode_state, encode_state, read_state
from tests.states.conftest import make_record, make_state


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_state_comes_back_bit_for_bit(table, dtype):
    record, sample_id = make_record(dtype=dtype), table.sample_ids[0]
    state = make_state(table, sample_id, record)
    back = decode_state(encode_state(state, sample_id, record.digest), sample_id, record.digest)
    for name in ("input_ids", "aux", "last"):
        assert torch.equal(getattr(back, name), getattr(state, name))
        assert getattr(back, name).dtype == getattr(state, name).dtype


def test_equal_states_are_equal_bytes(table):
    state = make_state(table, table.sample_ids[0])
    assert len({encode_state(state, "a", "b") for _ in range(20)}) == 1


def test_the_digest_covers_every_field_of_the_record():
    changed = [
        {"target": "other"},
        {"identity": {}},
        {"backend": "sglang"},
        {"backend_version": "6"},
        {"flags": {"a": 1}},
        {"boundaries": [1, 2, 5]},
        {"dtype": "float16"},
        {"hidden_size": 16},
    ]
    assert len({make_record().digest, *(make_record(**change).digest for change in changed)}) == 1 + len(changed)


def test_reading_refuses_a_file_under_another_samples_name(filled, table):
    one, other = table.sample_ids[0], table.sample_ids[4]
    filled.state_file(one).rename(filled.state_file(other))
    with pytest.raises(CheckRefused, match=f"{other}.*wrong tokens.*{one}"):
        read_state(filled.state_file(other), filled.record.digest)


def test_reading_refuses_another_capture_and_a_missing_file(filled, table):
    path = filled.state_file(table.sample_ids[0])
    with pytest.raises(CheckRefused, match="wrong capture"):
        read_state(path, "f" * 64)
    with pytest.raises(CheckRefused, match="missing"):
        read_state(path.with_name("0123456789abcdef.safetensors"), filled.record.digest)


def test_reading_refuses_a_file_with_a_tensor_too_many(filled, table):
    import safetensors.torch

    path, state = filled.state_file(table.sample_ids[0]), make_state(table, table.sample_ids[0])
    header = {"sample_id": table.sample_ids[0], "format": "1", "capture": filled.record.digest}
    tensors = {"input_ids": state.input_ids, "aux": state.aux.contiguous(), "last": state.last.contiguous()}
    write_bytes(path, safetensors.torch.save({**tensors, "loss_mask": torch.ones(5)}, header))
    with pytest.raises(CheckRefused, match=r"corrupt.*loss_mask"):
        read_state(path, filled.record.digest)


@pytest.mark.parametrize(
    ("change", "kind", "value"),
    [
        (lambda s: State(s.input_ids, s.aux[:2], s.last), "wrong length", "2 of 5"),
        (lambda s: State(s.input_ids, s.aux, s.last[:4]), "wrong length", "4 of 5"),
        (lambda s: State(s.input_ids, s.aux[:, :16], s.last), "wrong shape", "16"),
        (lambda s: State(s.input_ids, s.aux.float(), s.last), "wrong shape", "float32"),
        (lambda s: State(s.input_ids.long(), s.aux, s.last), "wrong shape", "int64"),
        (lambda s: State(s.input_ids, s.aux, s.last.index_fill(0, torch.tensor([3]), torch.nan)), "non-finite", "3"),
        (
            lambda s: State(s.input_ids, s.aux.index_fill(1, torch.tensor([9]), torch.inf), s.last),
            "non-finite",
            "5 rows",
        ),
    ],
)
def test_a_state_that_does_not_fit_its_tokens_is_named_with_the_value(table, change, kind, value):
    state = make_state(table, table.sample_ids[0])
    check_state(state, make_record())
    with pytest.raises(Damage, match=value) as damage:
        check_state(change(state), make_record())
    assert damage.value.kind == kind
