# Every target sets up what it needs; `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed: what running needs, and on top of it what an extra of pyproject.toml brings.
READY := $(VENV)/.ready
READY_TEST := $(READY)-test
BROWSERS := chromium chromium-browser google-chrome

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode is written when a module is first loaded, even where the environment says otherwise: loading torch and
# transformers without it takes twice as long, every time.
export PYTHONDONTWRITEBYTECODE :=
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Threads of torch that wait their turn by spinning make small steps up to 30 times slower beside other work.
export OMP_WAIT_POLICY := passive

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup report gpu wheels test test-all annotations faults pictures mutants bench table index verify notebooks docs format wheel browser clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

report: $(READY) ## Open the one-layer model and write report/report.html and report/report.json
	$(BIN)/mechicl report lsa-1l --out report

# Worker processes share the cores, so each computes with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

test: $(READY_TEST) browser ## Lint, check the format and the types, run the tests of the first tier (8 minutes on two cores)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST)

# The second run computes without vector instructions: no test depends on the processor.
test-all: $(READY_TEST) browser ## Run the tests of the second tier: docs, notebooks, JupyterLab, packaging, kills, ... (20 minutes)
	$(PYTEST) -m "slow and not pictures"
	ATEN_CPU_CAPABILITY=default $(PYTEST) --every 12

annotations: $(READY_TEST) browser ## Run every 12th test with all annotations checked at run time by beartype (an int may stand for a float)
	$(PYTEST) --every 12 \
	    "--jaxtyping-packages=mechicl,beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"

faults: $(READY_TEST) browser ## Try to break it: kills, damaged and hostile files, faulty calls (25 minutes; FAULTS="kills --seed 3")
	PYTHONPATH=. $(BIN)/python -m tests.faults $(FAULTS)

pictures: $(READY_TEST) browser ## Draw the report on every shipped checkpoint, and look for what is wrong with its pictures (an hour on two cores)
	$(PYTEST) -m "pictures or not pictures" tests/reports/test_every_picture.py

mutants: $(READY_TEST) ## Plant 200 faults one by one, and print which ones the tests do not notice (an hour on two cores)
	$(BIN)/python tests/mutants.py --n 200

bench: $(READY_TEST) ## Measure every ratio of docs/project/benchmarks.md in one run (BENCH=training a part, BENCH=--loaded beside other work)
	$(BIN)/python analyses/benchmark.py $(BENCH)

# One training a row, all of its models at once; each goes on where it was stopped, and a finished one is not repeated.
TABLE := $(addprefix nertinger-,linear leaky-relu-0.75 leaky-relu-0.5 leaky-relu-0.25 relu softmax)

table: $(READY) ## Train Nertinger's whole Table 1 and write analyses/results/nertinger_table.json
	for row in $(TABLE); do $(BIN)/mechicl train $$row --out checkpoints/$$row || exit 1; done
	$(BIN)/python analyses/nertinger_table.py

index: $(READY) ## Write analyses/README.md, the index of figures and tables, from analyses/results
	$(BIN)/python analyses/index.py

verify: $(READY) ## Measure the published numbers again, and list those that are not as written (VERIFY="--list", an entry, ...)
	$(BIN)/python analyses/verify.py $(VERIFY)

notebooks: $(READY)-notebooks ## Run the notebooks of analyses/ and save them with their outputs
	$(BIN)/python analyses/notebooks.py

# On a machine with a GPU: with the torch that is there, and what is missing from a folder of wheels where one is named.
# The environment sees the packages of the machine; nothing of constraints.txt, which pins torch for the CPU.
MINUTES ?= 40
WHEELS ?=
GPU_BIN := .venv-gpu/bin
FIND := $(if $(WHEELS),--no-index --find-links $(WHEELS))

gpu: $(if $(DRY),$(READY)) ## With a GPU: device tests, speeds, then the papers' size (MINUTES=40 WHEELS=folder; DRY=1 tries it without)
ifdef DRY
	$(BIN)/python analyses/on_a_gpu.py --dry --minutes 2 --runs runs/dry --out runs/dry
else
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "mechicl needs Python 3.11 or later: make gpu PYTHON=... names one")'
	@$(PYTHON) -c 'import importlib.util as u, sys; sys.exit(None if u.find_spec("torch") else "no torch: install a build of it for the GPU, or name the Python that has one, make gpu PYTHON=... (make gpu DRY=1 tries everything on the CPU)")'
	@$(PYTHON) -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else f"no GPU: torch {torch.__version__} finds no CUDA device (make gpu DRY=1 tries it on the CPU)")'
	@$(PYTHON) -m venv --system-site-packages .venv-gpu
	@$(PYTHON) -c 'import torch; print("torch==" + torch.__version__)' > .venv-gpu/torch.txt
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], "pytest", "hypothesis", "beartype", sep="\n")' > .venv-gpu/needs.txt
	@$(GPU_BIN)/python -m pip install --quiet $(FIND) --constraint .venv-gpu/torch.txt --requirement .venv-gpu/needs.txt
	PYTHONPATH=. $(GPU_BIN)/python analyses/on_a_gpu.py --minutes $(MINUTES)
endif

wheels: $(READY) ## Download what `make gpu WHEELS=wheels` needs on a machine without a network (FOR=3.12, its Python)
	$(BIN)/python analyses/gpu_wheels.py $(or $(WHEELS),wheels) --python $(or $(FOR),3.12)

docs: $(READY)-docs ## Build the documentation, site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site/index.html"

format: $(READY_TEST) ## Format the code and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY_TEST) ## Build and check what is published: dist/*.whl, checkpoints included, and dist/*.tar.gz
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

setup: $(READY_TEST) ## Only the virtual environment with all of it, at the versions of constraints.txt

# pip installs torch: a light build of it, or one for the machine's accelerator, is chosen in pip's configuration, which
# uv does not read. uv, a wheel in the same environment, installs the rest several times faster; where it cannot (an index
# that only pip's configuration names), pip does. hatchling, the build backend, is there before the package: it is a
# pinned version too. Nothing is compiled to bytecode here, because most of it is never loaded.
FROM := --constraint constraints.txt
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python $(FROM) --build-constraint constraints.txt
PIP := $(BIN)/pip install --quiet --no-compile $(FROM)
BY_PIP := echo "uv could not; pip installs it now, which takes longer." >&2

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "mechicl needs Python 3.11 or later: make PYTHON=... names one")'
	@echo "Setting up $(VENV); this takes about a minute the first time."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch uv hatchling
	@$(UV) --no-build-isolation-package mechicl --editable . \
	    || { $(BY_PIP); $(PIP) --no-build-isolation --editable .; }
	@touch $@

$(READY)-%: $(READY)
	@echo "Adding what $* needs to $(VENV)."
	@$(UV) --requirement pyproject.toml --extra $* \
	    || { $(BY_PIP); $(PIP) --no-build-isolation --editable '.[$*]'; }
	@touch $@

# The tests look at the report and the widgets in a real browser. Where Chromium is missing and
# cannot be installed, they are skipped with the reason, except under CI, where that is a failure.
browser: ## Install Chromium for the tests, if it is missing (Debian, as root or with sudo)
	@for name in $(BROWSERS); do command -v $$name >/dev/null 2>&1 && exit 0; done; \
	if [ "$$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi; \
	if command -v apt-get >/dev/null 2>&1 && $$sudo true 2>/dev/null; then \
	    echo "Installing Chromium, which the browser tests need."; \
	    $$sudo apt-get update -qq \
	        && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null \
	        && exit 0; \
	fi; \
	echo "Chromium is missing and could not be installed here: install one of $(BROWSERS)." >&2; \
	if [ -n "$$CI" ]; then exit 1; fi; \
	echo "The tests that need a browser will be skipped." >&2

clean: ## Remove everything that these targets made
	rm -rf $(VENV) build dist report site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
