# Everything starts here: `make demo` shows what it does, `make test` shows that it does it.

.PHONY: demo build setup test test-go lint fmt

TARGET := $(or $(CARGO_TARGET_DIR),target)

# 24 counting actors on 4 workers; Ctrl-C stops everything, the next one continues.
#   ONCE=1     stops by itself, and fails if a count is wrong or anything is left behind
#   DATA=DIR   keeps its state there
DATA ?= .demo
demo:
	@./setup
	@cargo build --quiet --release -p ate -p counter-demo
	@demos/counter/pack $(TARGET)/release/ate >/dev/null
	@$(TARGET)/release/counter-demo --ate $(TARGET)/release/ate --data-dir $(DATA) $(if $(filter-out 0,$(ONCE)),--once)

build:
	cargo build --release -p ate

setup:
	./setup --test

test: setup test-go
	cargo test --workspace --no-fail-fast

# The parts in Go: the sandbox runtimes and the demos' programs; the public client walks in the end-to-end tests.
test-go: setup
	cd demos/counter/app && go test ./...
	cd demos/public-client && go vet ./...
	cd runtime/gvisor && go test ./...
	runtime/smoke

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

fmt:
	cargo fmt --all
