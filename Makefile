# Everything starts here: `make demo` shows what it does, `make test` shows that it does it.

SHELL := /bin/bash

.PHONY: demo build setup test test-go bench sim mutations chaos lint fmt release-check

TARGET := $(or $(CARGO_TARGET_DIR),target)

# 24 counting actors on 4 workers; Ctrl-C stops everything, the next one continues.
#   ONCE=1     stops by itself, and fails if a count is wrong or anything is left behind
#   DATA=DIR   keeps its state there
DATA ?= .demo
demo:
	@./setup
	@echo 'building; the first time takes several minutes' >&2
	@cargo build --quiet --release -p ate -p counter-demo
	@demos/counter/pack $(TARGET)/release/ate >/dev/null
	@$(TARGET)/release/counter-demo --ate $(TARGET)/release/ate --data-dir $(DATA) $(if $(filter-out 0,$(ONCE)),--once)

# What is shipped and measured: one program, optimised as a whole. Takes longer to build than the demo's.
build:
	cargo build --profile dist -p ate

setup:
	./setup --test

test: setup lint test-go
	@cargo test --workspace --no-fail-fast 2>&1 | tee $(TARGET)/test.log; \
	status=$${PIPESTATUS[0]}; \
	awk '/^test result:/ { passed += $$4; failed += $$6; ignored += $$8 } \
		END { printf "tests: %d passed, %d failed, %d ignored\n", passed, failed, ignored }' $(TARGET)/test.log; \
	exit $$status

# The parts in Go: the sandbox runtimes and the demos' programs; the public client walks in the end-to-end tests.
test-go: setup
	cd demos/counter/app && go test ./...
	cd demos/public-client && go vet ./...
	cd runtime/gvisor && go test ./...
	runtime/smoke

# On a machine that does nothing else; a line for every event is kept in target/bench.
#   CHECK=1         fails if a target is missed
#   ACTORS=N,N,…    how many sleep beside the control plane; five million take half an hour and 50 GB of disk
bench: build
	./setup --bench
	for name in wake router density "control $(if $(ACTORS),--actors $(ACTORS))"; do \
		$(TARGET)/dist/ate bench $$name $(if $(CHECK),--check) --rows $(TARGET)/bench/$${name%% *}.jsonl || exit; \
	done

# The control plane in a simulation: `make sim SEEDS=10000` runs that many, `make sim SEED=7` one of them with its trace.
SEEDS ?= 1000
FIRST ?= 0
sim:
	@cargo build --quiet --release -p ate-sim --bin sim
	@$(TARGET)/release/sim $(if $(SEED),--seed $(SEED),$(SEEDS) $(FIRST))

# Puts bugs into a copy of the control plane, one at a time, and sees whether the simulation finds each.
mutations:
	@cargo run --quiet --release -p ate-sim --bin mutate -- 4000

# The real thing under real faults: `make chaos MINUTES=10`; SEED draws the same faults again. What was seen and said is kept
# in target/chaos if anything is wrong.
MINUTES ?= 10
chaos: setup
	@cargo build --quiet --release -p ate -p ate-chaos
	@$(TARGET)/release/chaos --ate $(TARGET)/release/ate --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
		--evidence $(TARGET)/chaos

# What a release must pass, beyond what every change must: two to three hours.
release-check:
	$(MAKE) test
	$(MAKE) sim SEEDS=10000 FIRST=$$(( $$(date +%s) * 10000 ))
	$(MAKE) mutations
	$(MAKE) chaos MINUTES=10
	$(MAKE) demo ONCE=1
	$(MAKE) bench CHECK=1 ACTORS=1000,100000,5000000

DENY := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ate/tools/cargo-deny-0.19.0/bin/cargo-deny
lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	@# It looks at every dependency, also at those that no build on this machine needs.
	cargo fetch --quiet --locked
	$(DENY) --offline check licenses bans sources

fmt:
	cargo fmt --all
