# Every target does its own set-up; only Python 3.11+ and make are needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BROWSER_READY := $(VENV)/.browser
# The real vLLM (CPU build) has an environment of its own.
VLLM_VENV  ?= .venv-vllm
VLLM_BIN   := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
# So has SGLang's scheduler, without kernels.
SGLANG_VENV  ?= .venv-sglang
SGLANG_BIN   := $(SGLANG_VENV)/bin
SGLANG_READY := $(SGLANG_VENV)/.ready
# So has Ray.
RAY_VENV  ?= .venv-ray
RAY_BIN   := $(RAY_VENV)/bin
RAY_READY := $(RAY_VENV)/.ready

# The demo needs a sixth of that, in an environment of its own unless the one for development is there.
DEMO_VENV  := $(if $(wildcard $(READY)),$(VENV),.venv-demo)
DEMO_NEEDS := numpy scipy highspy pydantic typer rich

# A network that stumbles is tried again.
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60
# Where it is set, each of the many processes of a suite would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
APT := DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=5 -o DPkg::Lock::Timeout=600

SOAK ?= 600

.PHONY: demo test test-live test-wheel wheel test-compiled test-laws reproduce test-browser test-vllm vllm-release test-sglang sglang-release test-ray bench-ray soak soak-route lint docs bench bench-route clean

demo: $(DEMO_VENV)/.ready
	$(DEMO_VENV)/bin/headgate demo

test: $(READY) lint
	$(BIN)/pytest -n 2

# The router and the emulator on real sockets.
test-live: $(READY)
	$(BIN)/pytest -n 2 tests/unit/live/route tests/unit/emulate

# Builds dist/, installs the wheel in a bare environment outside this folder and runs it there.
test-wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tools/check_wheel.py dist

# The wheel with compiled modules; needs a C compiler.
wheel: $(READY)
	rm -rf build dist/compiled
	HEADGATE_COMPILE=1 $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist/compiled .
	rm -rf build

# The same tables from compiled modules and from plain Python, in a bare environment outside this folder.
test-compiled: wheel
	$(BIN)/python tools/check_compiled.py dist/compiled

test-laws: $(READY)
	HYPOTHESIS_PROFILE=long $(BIN)/pytest -n 2 --timeout 3600 tests/laws tests/differential
	$(BIN)/pytest -n 2 tests/papers

# Every published table in full, against papers/outputs, with the compiled wheel; less than an hour on two cores.
# NAME=eb-table3 for one of them. Names, seconds and verdicts are listed at the end.
reproduce: wheel
	rm -rf dist/site dist/reproduce.log
	$(BIN)/pip install --quiet --no-deps --target dist/site dist/compiled/*.whl
	PYTHONPATH=$(CURDIR)/dist/site REPRODUCE_LOG=dist/reproduce.log $(BIN)/pytest -n 2 --timeout 7200 tests/reproductions \
		$(if $(NAME),-k $(NAME)); status=$$?; sort dist/reproduce.log; exit $$status

# Reports in a real browser, Debian's chromium; SCREENSHOTS=FOLDER keeps pictures of every kind to look at.
test-browser: $(BROWSER_READY)
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && $(APT) update && $(APT) install -y chromium; } \
		|| { echo "test-browser needs chromium: install it (on Debian: apt install chromium)"; exit 1; }
	$(BIN)/pytest tests/browser

test-vllm: $(VLLM_READY)
	$(VLLM_BIN)/pytest -n 2 --dist loadfile tests/engine

# Does headgate run in this release of vLLM? Its sources are fetched, the code that changed since the last one in
# the record is shown, and the suites run on its scheduler.
VERSION ?= newest
vllm-release: $(VLLM_READY)
	$(VLLM_BIN)/python tools/vllm_release.py $(VERSION) --diff

# WORLDS=1000 for so many random worlds.
test-sglang: $(SGLANG_READY)
	$(SGLANG_BIN)/pytest tests/sglang

# Does headgate run in this release of SGLang? Its sources are fetched, its seams are looked at, the suite runs on it.
sglang-release: $(SGLANG_READY)
	$(SGLANG_BIN)/python tools/sglang_release.py $(VERSION)

# HeadgateRouter in Ray Serve before eight emulated engines, sweeps on Ray, the manifests; Ray's own warnings aside.
test-ray: $(RAY_READY)
	$(RAY_BIN)/pytest -W ignore --timeout 1200 tests/ray_serve

# What HeadgateRouter costs beside Ray's power of two choices; needs a quiet machine.
bench-ray: $(RAY_READY)
	$(RAY_BIN)/python -m benchmarks.ray_router

# Twenty minutes of attack on the real server; not part of CI. MINUTES=3 for a short look.
soak: $(VLLM_READY)
	PYTHONPATH=tests/engine $(VLLM_BIN)/python tests/soak/soak.py --minutes $(or $(MINUTES),20)

# A router before emulators with faults and hang-ups for SOAK seconds: memory and descriptors stay flat.
soak-route: $(READY)
	$(BIN)/python -m benchmarks.soak_route --seconds $(SOAK) --streams $(or $(STREAMS),200)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports
	$(BIN)/codespell

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/check_site.py site

bench: $(READY)
	$(BIN)/python -m benchmarks

# What the router costs at 500 streams and 10,000 events/s, a minute; needs a quiet machine with four cores.
bench-route: $(READY)
	$(BIN)/python -m benchmarks.router --streams 500 --rate 10000 --seconds 20 --engines 4

$(READY): pyproject.toml papers/pyproject.toml leaderboard/pyproject.toml rayserve/pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e . -e papers -e leaderboard -e rayserve
	touch $(READY)

# Modules are compiled when they are first imported: most of scipy never is.
.venv-demo/.ready: pyproject.toml setup.py requirements-dev.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/pip install --quiet --disable-pip-version-check --no-compile --constraint requirements-dev.txt $(DEMO_NEEDS)
	.venv-demo/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps -e .
	touch $@

$(BROWSER_READY): $(READY) requirements-browser.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-browser.txt
	touch $(BROWSER_READY)

# The CPU build is sometimes resolved with torch's companions for another torch; nothing here needs them.
$(VLLM_READY): pyproject.toml requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -r requirements-vllm.txt
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	# NIXL hands KV over on a CPU too; what it depends on is CUDA's, which nothing here needs.
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $(VLLM_READY)

# The wheel of SGLang asks for CUDA and kernels: nothing here needs them.
$(SGLANG_READY): pyproject.toml papers/pyproject.toml requirements-sglang.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/pip install --quiet --disable-pip-version-check -r requirements-sglang.txt
	$(SGLANG_BIN)/pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 xgrammar==0.2.7
	$(SGLANG_BIN)/pip install --quiet --disable-pip-version-check --no-deps -e . -e papers
	touch $(SGLANG_READY)

$(RAY_READY): pyproject.toml rayserve/pyproject.toml requirements-dev.txt requirements-ray.txt
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_BIN)/pip install --quiet --disable-pip-version-check -r requirements-ray.txt
	$(RAY_BIN)/pip install --quiet --disable-pip-version-check --no-deps -e . -e rayserve
	touch $(RAY_READY)

clean:
	rm -rf $(VENV) .venv-demo $(VLLM_VENV) $(SGLANG_VENV) $(RAY_VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
