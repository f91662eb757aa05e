"""Takes whole files that no manifest lists back into the store: their writer was killed before the line, or the manifest is lost.

A file is adopted if it decodes, was made under this store's capture, and holds exactly the tokens of its sample. Its hash is
taken now, so a change of its bytes before today cannot be seen; the alignment proof is what looks at the numbers.
"""

import dataclasses

from eagle3_helpers.display import Table, bytes_text
from eagle3_helpers.durable import append_lines
from eagle3_helpers.progress import Progress
from eagle3_helpers.states.check_file import examine, in_threads
from eagle3_helpers.states.format import Damage
from eagle3_helpers.states.inventory import UNLISTED, Finding
from eagle3_helpers.states.manifest import Entry, new_manifest_file
from eagle3_helpers.states.store import Store

LINES_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Adoption:
    """The entries that were listed, and the findings about files that may not be used (for quarantine)."""

    adopted: list[Entry]
    refused: list[Finding]

    def _table(self) -> Table:
        size = bytes_text(sum(entry.bytes for entry in self.adopted))
        return Table(
            ["sample", "class", "detail"],
            [[finding.sample_id, finding.kind, finding.detail] for finding in self.refused],
            f"{len(self.adopted):,} unlisted files ({size}) are listed again, {len(self.refused):,} are not usable",
        )

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def adopt(store: Store, table, findings: list[Finding]) -> Adoption:
    """Reads every `unlisted` file among `findings` and lists the good ones; other findings are left alone."""
    unlisted = [finding for finding in findings if finding.kind == UNLISTED]
    adopted: list[Entry] = []
    refused: list[Finding] = []
    manifest = new_manifest_file(store)

    def read(finding: Finding) -> Entry | Finding:
        try:
            return examine(store, finding.sample_id, table.input_ids(finding.sample_id), None).entry
        except Damage as damage:
            return finding._replace(kind=damage.kind, detail=damage.detail)

    def list_from(start: int) -> None:
        if adopted[start:]:
            append_lines(manifest, [entry._asdict() for entry in adopted[start:]])

    with Progress("read unlisted files", len(unlisted), "files") as progress:
        listed = 0
        for result in in_threads(read, unlisted):
            (adopted if isinstance(result, Entry) else refused).append(result)
            progress.add()
            if len(adopted) - listed == LINES_AT_ONCE:
                list_from(listed)
                listed = len(adopted)
        list_from(listed)
    return Adoption(adopted, sorted(refused))
