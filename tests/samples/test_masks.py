"""Which tokens are trained: the assistant's turns with their end, whatever way the template shows them."""

import numpy as np
import pytest
from tokenizers import processors

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.samples.conversations import Conversation
from eagle3_helpers.samples.masks import (
    NO_ASSISTANT,
    NOT_STABLE,
    NOT_SUPERVISED,
    OUTSIDE_VOCABULARY,
    TEMPLATE_REFUSED,
    TRUNCATED,
    prompt_ids,
    tokenize,
)
from tests.makers import CHATML

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversation(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(1, [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)])


def trained(sample, target) -> list[str]:
    """The text of each supervised run."""
    edges = np.flatnonzero(np.diff([0, *sample.loss_mask, 0]))
    return [target.tokenizer.decode(sample.input_ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_answers_and_the_ends_of_their_turns_are_trained_and_nothing_else(target):
    sample = tokenize(conversation("tell me", "rivers are wet", "more", "no"), target, 200)
    assert trained(sample, target) == ["rivers are wet<|im_end|>", "no<|im_end|>"]
    assert target.tokenizer.decode(sample.input_ids) == (
        "<|im_start|>user\ntell me<|im_end|>\n<|im_start|>assistant\nrivers are wet<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "marks", [MARKED, MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")]
)
def test_generation_marks_give_the_same_mask_as_prefix_rendering(target, marks):
    talk = conversation("tell me", "rivers are wet", "more", "x")
    plain = tokenize(talk, target, 200)
    target.tokenizer.chat_template = marks
    assert tokenize(talk, target, 200) == plain


def test_a_one_token_answer_at_the_very_start_is_found_by_generation_marks(target):
    target.tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )
    talk = Conversation(1, [{"role": "assistant", "content": "a"}, {"role": "user", "content": " bcd"}])
    assert tokenize(talk, target, 200).loss_mask == [1, 0, 0, 0, 0]


def test_text_of_a_user_that_looks_like_an_answer_is_not_trained(target):
    fake = "<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>"
    assert trained(tokenize(conversation(fake, "real"), target, 200), target) == ["real<|im_end|>"]


def test_a_trailing_question_stays_and_is_not_trained(target):
    sample = tokenize(conversation("tell me", "rivers", "more"), target, 200)
    assert trained(sample, target) == ["rivers<|im_end|>"]
    assert target.tokenizer.decode(sample.input_ids).endswith("user\nmore<|im_end|>\n")


def test_a_long_prompt_leaves_nothing_to_train_and_is_rejected_by_name(target):
    assert tokenize(conversation("x" * 100, "yes"), target, 60).reason == TRUNCATED


def test_an_answer_cut_in_the_middle_is_kept_with_ids_and_mask_of_the_same_length(target):
    sample = tokenize(conversation("x" * 10, "y" * 100), target, 80)
    assert len(sample.input_ids) == len(sample.loss_mask) == 80
    assert sample.loss_mask[-1] == 1


def test_a_conversation_without_an_answer_gives_no_sample(target):
    assert tokenize(conversation("tell me"), target, 200).reason == NO_ASSISTANT


def test_bos_is_there_once_although_the_tokenizer_would_add_its_own(target):
    tokenizer = target.tokenizer
    bos = tokenizer.eos_token_id  # any special token does
    tokenizer.bos_token = "<|im_end|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", bos)]
    )
    assert tokenizer("a").input_ids[0] == bos
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    sample = tokenize(conversation("tell me", "rivers"), target, 200)
    assert sample.input_ids[0] == bos and sample.input_ids[1] != bos
    assert prompt_ids(conversation("tell me").messages, target) == sample.input_ids[: sample.loss_mask.index(1)]


def test_a_template_that_prints_bos_twice_is_refused(target):
    target.tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}" + CHATML
    with pytest.raises(CheckRefused, match="twice"):
        tokenize(conversation("tell me", "rivers"), target, 200)


def test_a_template_that_renders_earlier_answers_otherwise_is_not_prefix_stable(target):
    target.tokenizer.chat_template = CHATML.replace(
        "{{ message['content'] }}", "{{ message['content'] if loop.last or message['role'] == 'user' else 'short' }}"
    )
    assert tokenize(conversation("tell me", "rivers", "more", "no"), target, 200).reason == NOT_STABLE
    assert trained(tokenize(conversation("tell me", "rivers"), target, 200), target) == ["rivers<|im_end|>"]


def test_a_header_that_the_rendered_answer_does_not_have_is_not_prefix_stable(target):
    target.tokenizer.chat_template = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    assert tokenize(conversation("tell me", "rivers"), target, 200).reason == NOT_STABLE


def test_the_end_of_a_turn_inside_an_answer_does_not_end_its_mask(target):
    assert trained(tokenize(conversation("a", "b<|im_end|>c"), target, 200), target) == ["b<|im_end|>c<|im_end|>"]


def test_a_template_that_refuses_a_conversation_rejects_it_with_its_words(target):
    target.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    rejection = tokenize(conversation("a", "b"), target, 200)
    assert (rejection.reason, rejection.detail) == (TEMPLATE_REFUSED, "roles must alternate")


def test_a_template_that_prints_no_answers_gives_no_supervised_tokens(target):
    target.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    assert tokenize(conversation("a", "b"), target, 200).reason == NOT_SUPERVISED


def test_an_answer_without_a_token_that_ends_it_is_trained_as_a_whole(target):
    target.tokenizer.chat_template = CHATML.replace("<|im_end|>", "")
    assert trained(tokenize(conversation("a", "b"), target, 200), target) == ["b\n"]


def test_a_token_that_the_target_has_no_row_for_rejects_the_sample(target):
    target.tokenizer.add_tokens([f"word{number}" for number in range(100)])
    assert target.shape.vocab_size <= target.tokenizer.convert_tokens_to_ids("word99")
    assert tokenize(conversation("word99", "b"), target, 200).reason == OUTSIDE_VOCABULARY


def test_the_same_tokens_have_the_same_name(target):
    first, second = (tokenize(conversation("a", text), target, 200) for text in ("b", "c"))
    assert first.sample_id == tokenize(conversation("a", "b"), target, 200).sample_id != second.sample_id
    assert len(first.sample_id) == 16
