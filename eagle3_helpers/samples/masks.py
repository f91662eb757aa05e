"""Token ids of a conversation as the target's chat template renders it, and the mask of the tokens that are trained.

The ids come from the template itself, so a beginning-of-text token is there once: where the template prints it.
`loss_mask[t] = 1` says that the target wrote token t: the answer and the token that ends its turn. What the template
puts behind that (a newline) is 0, because a served target stops there.

Where a turn lies in the ids is never looked for in the text. A template with generation marks (`{% generation %}`) says
it itself. Otherwise the conversation is rendered up to each answer, once with the header that opens the answer and once
with the answer: both renderings must be prefixes, token for token, of the whole one. A template that renders earlier
turns differently (one that drops old thinking, say) breaks this, and such a conversation is rejected by that name.

A sample longer than `max_length` tokens is cut; if nothing trained is left it is rejected.
"""

import hashlib
import re
from dataclasses import dataclass, field

import jinja2
import numpy as np

from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.samples.conversations import Conversation, Rejection
from eagle3_helpers.target import Target

NO_ASSISTANT = "no assistant turn"
NOT_SUPERVISED = "no supervised tokens"
NOT_STABLE = "template is not prefix-stable"
TRUNCATED = "truncated before answer"
TEMPLATE_REFUSED = "template refused the conversation"
OUTSIDE_VOCABULARY = "token outside the target's vocabulary"
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
)  # a template's own refusal; turns or tools it cannot print
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Sample:
    """Both lists are L long; `loss_mask` holds 0 and 1."""

    line: int
    input_ids: list[int]
    loss_mask: list[int]
    repairs: list[str] = field(default_factory=list)

    @property
    def sample_id(self) -> str:
        return sample_id(self.input_ids)


def sample_id(input_ids) -> str:
    """First 16 hex of sha256 over the ids as little-endian int32: equal tokens are the same sample."""
    return hashlib.sha256(np.asarray(input_ids, "<i4").tobytes()).hexdigest()[:16]


def tokenize(conversation: Conversation, target: Target, max_length: int) -> Sample | Rejection:
    """The sample of a conversation, or why it gives none. Raises CheckRefused for a template that prints BOS twice."""
    messages = conversation.messages

    def rejected(reason: str, detail: str = "") -> Rejection:
        return Rejection(conversation.line, reason, detail, conversation.end)

    if not any(message["role"] == "assistant" for message in messages):
        return rejected(NO_ASSISTANT, f"{len(messages)} turns")
    tools = conversation.row.get("tools")
    try:
        if GENERATION_MARK.search(template_text(target)) and target.tokenizer.is_fast:
            ids, spans = _marked(messages, target, tools)
        else:
            ids, spans = _by_prefix(messages, target, tools)
    except TEMPLATE_ERRORS as error:
        return rejected(TEMPLATE_REFUSED, str(error))
    if spans is None:
        return rejected(NOT_STABLE)
    if max(ids) >= target.shape.vocab_size:
        return rejected(OUTSIDE_VOCABULARY, f"id {max(ids)}, vocabulary {target.shape.vocab_size}")
    mask = _mask(ids, spans, target.stop_ids)
    if not any(mask):
        return rejected(NOT_SUPERVISED)
    if not any(mask[:max_length]):
        return rejected(TRUNCATED, f"the first trained token is {mask.index(1)}, max_length {max_length}")
    return Sample(conversation.line, ids[:max_length], mask[:max_length], conversation.repairs)


def template_text(target: Target) -> str:
    """The chat template; of several, the one that plain conversations use."""
    template = target.tokenizer.chat_template
    return template["default"] if isinstance(template, dict) else template


def prompt_ids(messages: list[dict], target: Target, tools: list | None = None) -> list[int]:
    """What a server feeds the target before it answers: the conversation and the header that opens an answer."""
    return _render(messages, target, tools, add_generation_prompt=True)


def _render(messages: list[dict], target: Target, tools: list | None, add_generation_prompt: bool = False) -> list[int]:
    tokenizer = target.tokenizer
    ids = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    _refuse_two_bos(ids, target)
    return ids


def _refuse_two_bos(ids: list[int], target: Target) -> None:
    bos = target.tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise CheckRefused(
            f"the chat template of {target.folder} begins with {target.tokenizer.bos_token!r} twice.",
            "Take one of them out of the template: the target was trained with one.",
        )


def _marked(messages: list[dict], target: Target, tools: list | None) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and the spans that the template's own generation marks enclose."""
    encoded = target.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = list(encoded["input_ids"])
    _refuse_two_bos(ids, target)
    edges = np.flatnonzero(np.diff([0, *encoded["assistant_masks"], 0])).tolist()
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    stops = set(target.stop_ids)  # marks often end before the token that ends the turn
    return ids, [(start, end + 1 if end < len(ids) and ids[end] in stops else end) for start, end in spans]


def _by_prefix(
    messages: list[dict], target: Target, tools: list | None
) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Ids and the span of each answer; no spans where a rendering is no prefix of the whole one."""
    whole = _render(messages, target, tools)
    spans = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = prompt_ids(messages[:at], target, tools)
        after = whole if at + 1 == len(messages) else _render(messages[: at + 1], target, tools)
        if whole[: len(before)] != before or whole[: len(after)] != after:
            return whole, None
        spans.append((len(before), len(after)))
    return whole, spans


def _mask(ids: list[int], spans: list[tuple[int, int]], stop_ids: list[int]) -> list[int]:
    """1 in every span, up to and with the last token in it that ends a turn (all of it where there is none)."""
    mask = [0] * len(ids)
    for start, end in spans:
        stops = [at for at in range(start, end) if ids[at] in stop_ids]
        end = stops[-1] + 1 if stops else end
        mask[start:end] = [1] * (end - start)
    return mask
