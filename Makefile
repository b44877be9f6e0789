# Two commands on a machine with nothing but Python and make: `make demo`, `make test`.

PYTHON ?= python3
VENV ?= .venv
# Plain `torch` on Linux pulls gigabytes of CUDA packages; a GPU machine sets TORCH=torch.
TORCH ?= torch==2.13.0
RUN = $(VENV)/bin/python
# Threads that spin while they wait stall each other where cores are shared: beside one busy process
# the demo's model trained at 5300 tokens/s and more with this, at 1700 or less without.
export OMP_WAIT_POLICY = PASSIVE
# Where a machine forbids bytecode, each process that a test starts compiles the package's files again.
export PYTHONDONTWRITEBYTECODE =

# one thread a test process: two processes then keep two cores busy
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal

.PHONY: demo test test-avx2 test-oldest test-newest newest test-trainers test-all test-gpu lint check docs matrix venv engines test-engines

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet "$(TORCH)"
	$(RUN) -m pip install --quiet -e ".[dev]"
	touch $@

demo: venv
	$(RUN) tools/demo.py

test: venv
	$(PYTEST)

# As on a processor without AVX-512, whose libraries add in another order: what promises equal bits.
AVX2 = OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
AVX2_TESTS = tests/ops/test_consistent.py tests/models/test_consistent.py \
  tests/kernels/test_quick_interpreter.py tests/kernels/linear/test_bits_interpreted.py \
  tests/kernels/attention/test_triton_interpreted.py tests/parallel/test_context_bits.py

test-avx2: venv
	$(AVX2) $(PYTEST) $(AVX2_TESTS)

# Under the oldest transformers that pyproject.toml takes.
OLDEST = transformers==5.17.0
# what calls transformers, and the documents' examples but two: compile.md has none of it, and in
# convert.md that release's own Mamba2 norms two groups as one
OLDEST_TESTS = tests/integrations tests/models/test_packing.py tests/models/test_prefix_generation.py \
  tests/test_docs.py --deselect 'tests/test_docs.py::test_snippets_run[guides/compile.md]' \
  --deselect 'tests/test_docs.py::test_snippets_run[guides/convert.md]'

test-oldest: venv
	test -d $(VENV)/oldest || $(RUN) -m pip install --quiet --target $(VENV)/oldest "$(OLDEST)"
	PYTHONPATH=$(VENV)/oldest $(PYTEST) $(OLDEST_TESTS)

# Under the newest torch that pip may install (a constraint of the machine can hold it back) with the Triton it
# wants: what differs between releases of either, and a sample of the rest. Passes with 2.14.1 and 2.15.0.
# PyPI has it with CUDA's libraries alone: 2.6 GB, 5.2 GB unpacked.
NEWEST ?= torch>=2.14.1,<2.16
NEWEST_TESTS = tests/compiler/test_aot.py tests/cli/test_diagnosis.py \
  tests/kernels/test_compiles.py::test_matrix_reaches_every_kernel_and_family \
  tests/gluon_emulator/test_race_detector.py tests/kernels/test_sm90_names.py \
  tests/runtime/test_call_replay.py tests/runtime/test_launch_cache.py tests/runtime/test_triton_launcher.py \
  tests/models/test_export.py tests/ops/test_compile.py::test_linear_ops_pass_opcheck \
  tests/ops/test_compile.py::test_operator_exports_with_gradients tests/ops/test_random_sizes.py

newest: venv
	test -f $(VENV)/newest/.installed || { $(RUN) -m pip install --quiet --no-compile --upgrade \
	  --target $(VENV)/newest "$(NEWEST)" && touch $(VENV)/newest/.installed; }

test-newest: newest
	PYTHONPATH=$(VENV)/newest $(PYTEST) $(NEWEST_TESTS)

# With what others train with, and fla's own files, of which `make test` has neither.
TRAINERS_TESTS = tests/integrations tests/compat/test_fla_interop.py tests/compat/test_fla_references.py \
  tests/models/test_convert_fla.py tests/models/test_module_contracts.py tests/models/test_ways.py \
  tests/nn/test_changed_modules.py tests/nn/test_ways.py tests/training/test_run.py

test-trainers: venv
	$(RUN) -m pip install --quiet "$(TORCH)" -e ".[dev,trainers]"
	$(RUN) -m pip install --quiet --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 einops
	$(PYTEST) -m "" $(TRAINERS_TESTS)

test-all: venv
	$(PYTEST) -m ""

# What needs a device; most of its time is compilation, which all cores do.
test-gpu: venv
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "" -n 16 --dist worksteal tests/gpu

# The Python files of vLLM, SGLang and torchtitan, which slow tests load as they are. A test whose engine
# is not there is skipped, unless REQUIRE_ENGINES is set.
engines: venv
	$(RUN) tools/engines.py

test-engines: engines
	REQUIRE_ENGINES=1 $(PYTEST) -m "" tests/engines

lint: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright
	$(RUN) tools/sizes.py
	$(RUN) tools/call_path.py --check
	$(RUN) tools/road.py --check
	git ls-files -z | xargs -0 $(VENV)/bin/codespell

check: lint test

# The documentation site, docs/_build/html. Any warning, such as a broken link, is an error.
docs: venv
	OMP_NUM_THREADS=1 $(RUN) -m sphinx -E -W -n -q --keep-going -b html docs docs/_build/html

# The kernels for every architecture, without a GPU: docs/SUPPORT.md. Under the Triton that is here
# thoroughly, with other ptxas on sm_90 if PTXAS names some, and under the other releases briefly.
RELEASES ?= 3.7.1,3.8.0,3.9.0
PTXAS ?=
matrix: venv
	$(foreach x,$(PTXAS),TRITON_PTXAS_PATH=$(x) $(RUN) tools/matrix.py --arch sm_90 --record;)
	$(RUN) tools/matrix.py --record
	$(RUN) tools/matrix.py --triton $(RELEASES) --variants few --record
