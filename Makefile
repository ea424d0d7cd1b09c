# Everything starts here: `make demo` shows what it does, `make test` shows that it does it.

.PHONY: build setup test test-go lint fmt

build:
	cargo build --release -p ate

setup:
	./setup --test

test: setup test-go
	cargo test --workspace --no-fail-fast

# The parts in Go: the sandbox runtimes and the demo's program.
test-go: setup
	cd demos/counter/app && go test ./...
	cd runtime/gvisor && go test ./...
	runtime/smoke

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

fmt:
	cargo fmt --all
