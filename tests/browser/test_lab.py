"""The notebooks by hand: JupyterLab in a real browser, Run All, the approval form clicked by a person's hand.

Needs Chromium and the extra `browser`; `make test-browser` runs it.
"""

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from eagle3_helpers.runner import NOTEBOOKS
from tests.conftest import Home, until
from tests.makers import make_home, teach_target

TOKEN = "for-this-test"
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
CLOSED = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Home:
    """A home whose `params/demo.yaml`, which the notebooks open by default, is a tiny run."""
    folder = tmp_path_factory.mktemp("lab")
    params = make_home(folder, run_id="demo")
    params.rename(params.with_name("demo.yaml"))
    teach_target(folder / "target", folder / "conversations.jsonl")
    shutil.copytree(NOTEBOOKS, folder / "notebooks", ignore=shutil.ignore_patterns(".*"))
    return Home(folder, params.with_name("demo.yaml"))


@pytest.fixture(scope="module")
def lab(home):
    """The address of a JupyterLab that serves this home."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = home.folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')  # all cells are in the page
    log = open(home.folder / "lab.log", "w")  # noqa: SIM115 (closed when the session ends)
    options = [f"--port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={home.folder}"]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", *options],
        env={**home.environment, "JUPYTERLAB_SETTINGS_DIR": str(settings.parents[1])},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    until(lambda: "is running at" in (home.folder / "lab.log").read_text())
    yield f"http://127.0.0.1:{port}/lab/tree/notebooks"
    server.terminate()
    server.wait(timeout=30)


@pytest.fixture(scope="module")
def page():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CLOSED)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(120_000)
        yield page
        browser.close()


def open_notebook(page: Page, lab: str, name: str) -> None:
    page.goto(f"{lab}/{name}.ipynb?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()


def menu(page: Page, entry: str) -> None:
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{entry}$")).click()


def picture(page: Page, name: str) -> None:
    """Keeps what a person would see, where EAGLE3_SCREENSHOTS says."""
    folder = os.environ.get("EAGLE3_SCREENSHOTS")
    if folder:
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)


@pytest.mark.parametrize("stage", ["01_recover", "02_extract", "03_verify", "04_inspect_freeze"])
def test_run_all_gives_the_receipt(home, lab, page, stage):
    open_notebook(page, lab, stage)
    menu(page, "Run All Cells")
    try:
        until(lambda: home.receipt("demo", stage))
    finally:
        picture(page, stage)


def test_training_stops_at_the_launch_until_a_person_approves_in_the_form(home, lab, page):
    open_notebook(page, lab, "05_train")
    menu(page, "Run All Cells")
    refusal = page.locator(".jp-RenderedText", has_text="STOP (NotApproved)")
    expect(refusal).to_contain_text("eagle3-runbook approve --run demo", timeout=120_000)
    assert not (home.out("demo") / "training" / "process.json").exists()
    form = page.locator(".jp-OutputArea-output .widget-vbox").first
    for box in form.locator("input[type=checkbox]").all():
        box.check()
    fields = form.locator("input[type=text]")
    fields.nth(0).fill("demo")
    fields.nth(1).fill("Ada")
    fields.nth(2).fill("read the plan")
    picture(page, "05_form")
    form.get_by_role("button", name="Approve").click()
    until(lambda: (home.out("demo") / "approval.json").exists())
    launch = page.locator(".jp-CodeCell", has_text="launch(run, redeem)").last
    launch.locator(".cm-content").click()
    menu(page, "Run Selected Cell and All Below")
    until(lambda: home.receipt("demo", "05_train"))
    picture(page, "05_train")


def test_evaluation_gives_its_receipt_and_the_report(home, lab, page):
    open_notebook(page, lab, "06_evaluate")
    menu(page, "Run All Cells")
    until(lambda: home.receipt("demo", "06_evaluate"))
    until(lambda: (home.out("demo") / "report.html").exists())
    picture(page, "06_evaluate")
