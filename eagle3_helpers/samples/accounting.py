"""The account of a conversations file: every row that was read ends in exactly one place.

    read = accepted + rejected (by reason) + duplicates

A repair (see conversations.py) is counted by kind under the accepted rows, because the row is in, but not as it came.
"""

from collections import Counter
from collections.abc import Iterable

from eagle3_helpers.display import Table
from eagle3_helpers.errors import StageFailed
from eagle3_helpers.samples.conversations import Rejection
from eagle3_helpers.samples.masks import Sample

LINES_KEPT = 20  # line numbers that are kept for each reason


class Accounting:
    def __init__(self):
        self.read = self.accepted = self.duplicates = 0
        self.rejected, self.repaired = Counter(), Counter()
        self.rejected_lines: dict[str, list[int]] = {}

    def accept(self, sample: Sample) -> None:
        self.accepted += 1
        self.repaired.update(sample.repairs)

    def reject(self, rejection: Rejection) -> None:
        self.rejected[rejection.reason] += 1
        lines = self.rejected_lines.setdefault(rejection.reason, [])
        if len(lines) < LINES_KEPT:
            lines.append(rejection.line)

    def reasons(self, among: Iterable[str]) -> str:
        """E.g. "not JSON 2 (line 7), no user turn 1 (line 9)"."""
        return ", ".join(
            f"{reason} {self.rejected[reason]:,} (line {self.rejected_lines[reason][0]})"
            for reason, _ in self.rejected.most_common()
            if reason in among
        )

    def close(self, stored: int) -> dict:
        """The account as plain values. Raises StageFailed where it does not add up with the samples that are stored."""
        rejected = sum(self.rejected.values())
        if stored != self.accepted or self.read != self.accepted + rejected + self.duplicates:
            raise StageFailed(
                f"the account does not add up: read {self.read:,}, accepted {self.accepted:,}, stored {stored:,}, "
                f"rejected {rejected:,}, duplicates {self.duplicates:,}.",
                "This is a defect of the runbook; keep the conversations file and report it.",
            )
        return {
            "read": self.read,
            "accepted": self.accepted,
            "rejected": dict(self.rejected.most_common()),
            "repaired": dict(self.repaired.most_common()),
            "duplicates": self.duplicates,
            "rejected_lines": self.rejected_lines,
        }


def accounting_table(accounting: dict, caption: str) -> Table:
    """What `close` returned as an equation, one line a term."""
    rows = [["rows read", accounting["read"], ""], ["= accepted", accounting["accepted"], ""]]
    rows += [[f"    of these: {kind}", count, "repaired"] for kind, count in accounting["repaired"].items()]
    for reason, count in accounting["rejected"].items():
        lines = accounting["rejected_lines"][reason]
        more = " ..." if count > len(lines) else ""
        rows.append([f"+ rejected: {reason}", count, f"line {', '.join(map(str, lines))}{more}"])
    rows.append(["+ duplicates", accounting["duplicates"], "the same tokens as an earlier row"])
    return Table(["account", "rows", ""], rows, caption)
