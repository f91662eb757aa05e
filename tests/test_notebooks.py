"""The notebooks as they are shipped: one skeleton, one parameters cell, no logic, no outputs."""

import ast
import re

import nbformat
import pytest

from eagle3_helpers.runner import NOTEBOOKS
from eagle3_helpers.stages import STAGES

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
STAGE_PATHS = [path for path in PATHS if path.stem != "00_index"]
CARD = ["Inputs", "Outputs", "Changes", "Typical time", "Needs a GPU", "Safe to run again"]
BANNED_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Try, ast.Lambda, ast.While)
BANNED_TEXT = re.compile(r"^\s*[!%]|\binput\(|\bsys\.exit|\bexit\(|raises-exception|\| None", re.MULTILINE)


def cells(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def headings(path):
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    return re.findall(r"^(#+) (.+)$", text, re.MULTILINE)


def test_there_is_an_index_and_a_notebook_for_each_stage_in_order():
    assert [path.stem for path in PATHS] == ["00_index", *(stage.name for stage in STAGES)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_has_one_parameters_cell_that_papermill_can_read(path):
    from papermill.inspection import inspect_notebook

    tagged = [cell for cell in cells(path, "code") if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    known = inspect_notebook(str(path))
    assert list(known) == ["params_file", "run_id", "overrides"]
    assert all(parameter["help"] for parameter in known.values())


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs_for_the_kernel_python3(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.kernelspec.display_name == "Python 3 (ipykernel)"
    assert all(not cell.outputs and cell.execution_count is None for cell in cells(path, "code"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_its_cells_are_short_calls_without_logic(path):
    for cell in cells(path, "code"):
        assert not BANNED_TEXT.search(cell.source), cell.source
        assert not [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, BANNED_NODES)], cell.source
        assert len([line for line in cell.source.splitlines() if line.strip()]) <= 12, cell.source


@pytest.mark.parametrize("path", STAGE_PATHS, ids=lambda path: path.stem)
def test_its_headings_are_the_procedure(path):
    found = headings(path)
    assert [level for level, _ in found].count("#") == 1
    assert found[0][0] == "#"
    names = [name for level, name in found if level == "##"]
    assert names[:3] == ["Parameters", "Before you start", "Preflight"]
    assert names[-3:] == ["Stop here if", "Undo", "Next"]
    assert "Verify" in names[: names.index("Receipt")]
    steps = [name for name in names if re.match(r"\d+\. ", name)]
    assert [int(name.split(".")[0]) for name in steps] == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("path", STAGE_PATHS, ids=lambda path: path.stem)
def test_its_first_cell_says_what_it_needs_and_changes(path):
    first = cells(path, "markdown")[0].source
    assert re.search(r"^> .+", first, re.MULTILINE)
    assert [row.split("|")[1].strip() for row in first.splitlines() if row.startswith("| ")][1:] == CARD


@pytest.mark.parametrize("path", STAGE_PATHS, ids=lambda path: path.stem)
def test_every_step_says_do_expect_if_not(path):
    for cell in cells(path, "markdown"):
        if re.match(r"## \d+\. ", cell.source):
            assert [word in cell.source for word in ("**Do:**", "**Expect:**", "**If not:**")] == [True] * 3, (
                cell.source
            )
