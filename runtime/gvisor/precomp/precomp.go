// Package precomp gives runsc the seccomp programs that upstream's own release
// build has and a `go build` lacks. Without them every start and every restore
// compiles the rules anew: 12-16 ms in the sentry, and again in the gofer.
//
// Upstream keeps the programs in an unexported map which its build system fills
// from generated code. We fill the same map, reached by name, with our generated
// code; a configuration that is not in it still works, only slower.
//
// Regenerate after moving the gVisor pin, on each architecture, then commit:
// the generator's output is not deterministic (see ../cmd/genprecomp).
//
//go:generate sh -c "go run ../cmd/genprecomp -o programs_$(go env GOARCH).go"
package precomp

import (
	_ "unsafe" // for go:linkname

	pc "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	sentry "gvisor.dev/gvisor/runsc/boot/filter"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter"
)

//go:linkname sentryRegistry gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var sentryRegistry map[string]pc.Program

//go:linkname goferRegistry gvisor.dev/gvisor/runsc/fsgofer/filter.precompiledPrograms
var goferRegistry map[string]pc.Program

func init() {
	// The first lookup makes upstream create its (empty) map, once; a later one
	// leaves what we put there alone.
	sentry.GetPrecompiled("")
	register(sentryRegistry, sentryPrograms())
	gofer.GetPrecompiled("")
	register(goferRegistry, goferPrograms())
}

func register(registry map[string]pc.Program, programs []pc.Program) {
	for _, program := range programs {
		registry[program.Name] = program
	}
}
