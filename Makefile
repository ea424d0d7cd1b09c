# Everything starts here: `make demo` shows what it does, `make test` shows that it does it.

.PHONY: build setup test test-go lint fmt

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
