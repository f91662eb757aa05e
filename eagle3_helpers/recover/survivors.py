"""What a crash left of earlier work: stages that were cut off, stored states, checkpoints."""

from eagle3_helpers.display import Checks, Table
from eagle3_helpers.runs import Run
from eagle3_helpers.states.adopt import Adoption, adopt
from eagle3_helpers.states.inventory import UNLISTED, Inventory, take_inventory
from eagle3_helpers.states.quarantine import Quarantined, quarantine
from eagle3_helpers.states.store import Store
from eagle3_helpers.training.checkpoints import Checkpoints


class Survivors:
    """`inventory` is None where nothing was ever stored, or no sample table says what should be."""

    def __init__(self, run: Run, store: Store | None, samples):
        self.run, self.store, self.samples = run, store, samples
        self.interrupted = run.interrupted()
        self.inventory: Inventory | None = take_inventory(store, samples) if store and samples else None
        self.checkpoints = Checkpoints(run.folder / "training" / "checkpoints").listing()

    @property
    def findings(self) -> list:
        return self.inventory.findings if self.inventory else []

    def values(self) -> dict:
        """What recovery.json holds: before anything was moved."""
        return {
            "interrupted": self.interrupted,
            "states": self.inventory.counts if self.inventory else None,
            "findings": [finding._asdict() for finding in self.findings],
            "checkpoints": [{"name": name, "complete": not wrong, "why": wrong} for name, wrong in self.checkpoints],
        }

    def put_right(self) -> "PutRight":
        """Lists whole files that no manifest lists, moves the damaged rest to quarantine. Deletes nothing."""
        if not self.findings:
            return PutRight(None, None)
        adoption = adopt(self.store, self.samples, self.findings)
        damaged = [finding for finding in self.inventory.damage if finding.kind != UNLISTED]
        return PutRight(adoption, quarantine(self.store, [*damaged, *adoption.refused]))

    def checks(self) -> Checks:
        """That nothing damaged is left where a later stage would read it."""
        left = self.inventory.damage if self.inventory else []
        names = ", ".join(finding.sample_id for finding in left[:3])
        return Checks("After putting right").add(
            "nothing damaged among the states",
            not left,
            f"{len(left)} {names}".strip(),
            "0",
            "Run this notebook again.",
        )

    def _tables(self) -> list[Table]:
        attempts = Table(["attempt without an end"], [[name] for name in self.interrupted] or [["none"]], "Interrupted")
        checkpoints = [[name, "not complete" if wrong else "complete", wrong] for name, wrong in self.checkpoints]
        return [
            attempts,
            self.inventory or Table(["states"], [["nothing stored yet that a sample table of this run asks for"]]),
            Table(["checkpoint", "state", "why"], checkpoints or [["none", "", ""]], "Checkpoints"),
        ]

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self._tables()))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._tables())


class PutRight:
    """What was done about findings; both are None where there was nothing to do."""

    def __init__(self, adoption: Adoption | None, quarantined: Quarantined | None):
        self.adoption, self.quarantined = adoption, quarantined

    @property
    def adopted(self) -> int:
        return len(self.adoption.adopted) if self.adoption else 0

    @property
    def moved(self) -> int:
        return self.quarantined.files if self.quarantined else 0

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, (self.adoption, self.quarantined))) if self.adoption else "nothing to put right"

    def _repr_html_(self) -> str:
        return self.adoption._repr_html_() + self.quarantined._repr_html_() if self.adoption else repr(self)


def find_survivors(run: Run, store: Store | None, samples) -> Survivors:
    """Looks only. Raises CheckRefused for a damaged manifest."""
    return Survivors(run, store, samples)
