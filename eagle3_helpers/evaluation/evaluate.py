"""How good is the exported draft? Its acceptance length on prompts it was not trained on, beside three measures.

- The same draft untrained, decoded in the same way: what the architecture gets for nothing.
- A bigram table of the training text: what needs no hidden states.
- Plain greedy decoding: the answers must be the same, ties of the numbers apart.

Acceptance length = sum(tokens) / sum(steps) over prompts, as SGLang's sum(completion_tokens) / sum(spec_verify_ct): the
first token of an answer comes from the prompt's forward and is counted without a step, so short answers read a little
high (64 tokens without a single accepted draft: 64/63). per_position[j] is the share of all steps whose draft tokens
1..j+1 were all accepted. A draft of which nothing was accepted was not used, whatever the ratio says.

Tokens per second are of this reference, in torch and without a server; they compare the drafts, not a deployment.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from eagle3_helpers.display import Checks, Table
from eagle3_helpers.draft.export import export_digest, load_exported
from eagle3_helpers.errors import CheckRefused
from eagle3_helpers.evaluation.bigram import count_bigram, replay
from eagle3_helpers.evaluation.intervals import bootstrap_interval, ratio_of_sums
from eagle3_helpers.evaluation.lossless import Difference, first_differences, greedy
from eagle3_helpers.evaluation.prompts import Prompt, choose_prompts, read_prompts, trained_on
from eagle3_helpers.evaluation.reference_decoding import Answer, decode
from eagle3_helpers.params import EvaluationParams, resolve
from eagle3_helpers.progress import Progress
from eagle3_helpers.target import Target

USED, NOT_USED, DIFFERENT = "draft used", "draft not used", "answers differ"
NOT_USED_LIST = (
    "Look at: lm_head (in the export, and not random?); embeddings (the target's?); d2t (offsets, not ids or zeros?); "
    "layer ids (boundaries - 1?); norm flags (none set?). The export's audit names the first four."
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`summary` is what summary.json holds, `rows` what prompts.jsonl holds."""

    summary: dict
    rows: list[dict]

    @property
    def checks(self) -> Checks:
        """The draft was used, the answers are the target's, and training gained something."""
        s, checks = self.summary, Checks("Evaluation")
        used = any(s["per_position"])
        checks.add("draft used", used, s["verdict"], "some draft token accepted", NOT_USED_LIST)
        observed = f"{s['lossless_mismatches']} mismatches, {len(s['ties'])} ties"
        remedy = "The rows are in summary.json under `mismatches`; a wrong position or mask is the usual cause."
        checks.add("same answers as greedy", s["lossless_mismatches"] == 0, observed, "0 mismatches", remedy)
        gained = s["acceptance_length"] > s["acceptance_length_untrained"]
        untrained = f"more than {s['acceptance_length_untrained']:.3f}"
        checks.add("better than untrained", gained, f"{s['acceptance_length']:.3f}", untrained, NOT_USED_LIST)
        return checks

    @property
    def by_category(self) -> dict[str, tuple[float, float, float]]:
        """Acceptance length and its interval's bounds, of every category that took a step."""
        return {
            name: (part["acceptance_length"], *part["acceptance_interval"])
            for name, part in self.summary["per_category"].items()
            if part["acceptance_length"] is not None
        }

    def _table(self) -> Table:
        s = self.summary
        rows = []
        for name, part in {"trained draft": s, **s["per_category"]}.items():
            measured = part["acceptance_length"] is not None
            shown = f"{part['acceptance_length']:.3f}" if measured else "not measured"
            interval = "{:.3f} to {:.3f}".format(*part["acceptance_interval"]) if measured else ""
            rows.append([name if part is s else f"  {name}", part["n_prompts"], shown, interval])
        rows.append(["bigram table", s["n_prompts"], f"{s['acceptance_length_bigram']:.3f}", ""])
        rows.append(["untrained draft", s["n_prompts"], f"{s['acceptance_length_untrained']:.3f}", ""])
        shares = ", ".join(f"{share:.1%}" for share in s["per_position"])
        caption = f"Acceptance length ({s['verdict']}); draft tokens accepted up to position 1, 2, ...: {shares}"
        return Table(["what", "prompts", "acceptance length", "95 % interval"], rows, caption)

    def __repr__(self) -> str:
        return f"{self._table()!r}\n\n{self.checks!r}"

    def _repr_html_(self) -> str:
        return self._table()._repr_html_() + self.checks._repr_html_()


def evaluate(params: EvaluationParams, target: Target, exported_folder: Path, samples, untrained) -> Evaluation:
    """Measures the export at `exported_folder`; writes nothing.

    `samples` is the SampleTable of the training, `untrained` a Draft initialised with the training seed. Prompts that
    begin a training sample, or whose answers would pass the draft's last position, are left out and listed. `untrained`
    is moved to the device and dtype of the evaluation.
    Raises what loading and reading raise, and CheckRefused where no prompt is left. Verdicts are in `.checks`.
    """
    draft, draft_vocab = load_exported(exported_folder, target)
    prompts, left_out = _choose(params, target, samples, draft.config.max_position_embeddings)
    model = target.load_model(params.dtype, params.device)
    settings = {"answer_tokens": params.answer_tokens, "stop_ids": target.stop_ids}
    batches = _batches(prompts, params.batch)
    with Progress("evaluate", 3 * len(prompts), "answers") as progress:

        def answer(one_batch: Callable[[list], list]) -> tuple[list, float]:
            """Results in the order of `prompts`, and the seconds they took."""
            results, start = [None] * len(prompts), time.perf_counter()
            for places in batches:
                for place, result in zip(places, one_batch([prompts[p].input_ids for p in places]), strict=True):
                    results[place] = result
            return results, time.perf_counter() - start

        def speculative(draft) -> tuple[list[Answer], float]:
            draft = draft.to(model.device, model.dtype).eval()
            chain = {**settings, "draft_tokens": params.draft_tokens, "ended": progress.add}
            return answer(lambda batch: decode(model, draft, draft_vocab, batch, **chain))

        def plain_greedy(batch: list) -> list[list[int]]:
            answers = greedy(model, batch, **settings)
            progress.add(len(batch))
            return answers

        trained, seconds = speculative(draft)
        plain, plain_seconds = answer(plain_greedy)
        bare, _ = speculative(untrained)
    differences = []
    for places in batches:
        inputs, decoded = [prompts[p].input_ids for p in places], [trained[p].tokens for p in places]
        for found in first_differences(model, inputs, [plain[p] for p in places], decoded):
            differences.append((prompts[places[found.prompt]].prompt_id, found))
    following = count_bigram(samples, target.shape.vocab_size)
    tokens = sum(len(answer.tokens) for answer in trained)
    summary = {
        **_acceptance(params, prompts, trained, differences),
        "acceptance_length_untrained": _length(bare),
        "acceptance_length_bigram": ratio_of_sums(
            [len(answer) for answer in plain], [replay(following, answer, params.draft_tokens) for answer in plain]
        ),
        "tokens": tokens,
        "steps": sum(answer.steps for answer in trained),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_greedy": sum(map(len, plain)) / plain_seconds,
        "left_out": left_out,
        "draft": export_digest(exported_folder),
        "settings": {**params.model_dump(mode="json"), "stop_ids": target.stop_ids, "decoding": "greedy chain"},
    }
    rows = [
        {
            "prompt_id": prompt.prompt_id,
            "category": prompt.category,
            "tokens": len(answer.tokens),
            "steps": answer.steps,
            "accepted": answer.accepted,
            "text": target.tokenizer.decode(answer.tokens, skip_special_tokens=True),
        }
        for prompt, answer in zip(prompts, trained, strict=True)
    ]
    return Evaluation(summary, rows)


def _choose(params: EvaluationParams, target: Target, samples, positions: int) -> tuple[list[Prompt], dict]:
    """The prompts to answer, and the ids of those left out by reason."""
    everything = read_prompts(resolve(params.prompts), target)
    known = trained_on(everything, samples)
    room = positions - params.answer_tokens - params.draft_tokens
    too_long = {prompt.prompt_id for prompt in everything if len(prompt.input_ids) > room} - known
    prompts = choose_prompts([p for p in everything if p.prompt_id not in known | too_long], params.max_prompts)
    if not prompts:
        raise CheckRefused(
            f"of {len(everything)} prompts, {len(known)} begin a training sample and {len(too_long)} are too long.",
            "Evaluate on prompts that the draft was not trained on.",
        )
    return prompts, {"trained_on": sorted(known), "too_long": sorted(too_long)}


def _acceptance(
    params: EvaluationParams, prompts: list[Prompt], answers: list[Answer], differences: list[tuple[str, Difference]]
) -> dict:
    """The verdict and everything counted from the draft's answers."""
    found = [({**dataclasses.asdict(d), "prompt": name}, d.is_tie(params.tie_gap)) for name, d in differences]
    mismatches = [row for row, tie in found if not tie]
    steps = sum(answer.steps for answer in answers)
    length = _length(answers)
    per_position = [sum(a.accepted[place] for a in answers) / steps for place in range(params.draft_tokens)]
    categories = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        categories.setdefault(prompt.category, []).append(answer)
    return {
        "verdict": NOT_USED if not any(per_position) else DIFFERENT if mismatches else USED,
        "acceptance_length": length,
        "acceptance_interval": _interval(answers, params.seed),
        "per_position": per_position,
        "n_prompts": len(prompts),
        "per_category": {name: _category(part, params.seed) for name, part in categories.items()},
        "lossless_mismatches": len(mismatches),
        "mismatches": mismatches,
        "ties": [row for row, tie in found if tie],
    }


def _category(answers: list[Answer], seed: int) -> dict:
    measured = any(answer.steps for answer in answers)  # else every answer ended at its first token
    return {
        "n_prompts": len(answers),
        "acceptance_length": _length(answers) if measured else None,
        "acceptance_interval": _interval(answers, seed) if measured else None,
    }


def _length(answers: list[Answer]) -> float:
    return ratio_of_sums([len(answer.tokens) for answer in answers], [answer.steps for answer in answers])


def _interval(answers: list[Answer], seed: int) -> list[float]:
    return bootstrap_interval([len(answer.tokens) for answer in answers], [answer.steps for answer in answers], seed)


def _batches(prompts: list[Prompt], size: int) -> list[list[int]]:
    """Places of `prompts`, those of like length together: padding costs a forward as much as text."""
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place].input_ids))
    return [order[start : start + size] for start in range(0, len(order), size)]
