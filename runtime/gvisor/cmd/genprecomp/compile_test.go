package main

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/bpf"
	"gvisor.dev/gvisor/pkg/seccomp"
	pc "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	sentryfilter "gvisor.dev/gvisor/runsc/boot/filter"
	sentry "gvisor.dev/gvisor/runsc/boot/filter/config"
	goferfilter "gvisor.dev/gvisor/runsc/fsgofer/filter"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter/config"

	_ "ate.dev/runtime/gvisor/precomp"
)

func TestTheCommittedSentryProgramsDecideAsUpstreamsRulesDo(t *testing.T) {
	variants, err := sentryVariants()
	if err != nil {
		t.Fatal(err)
	}
	for _, variant := range variants {
		allow, deny := sentry.Rules(variant)
		fresh := program(allow, deny, sentry.SeccompOptions(variant))
		committed, found := sentryfilter.GetPrecompiled(variant.ConfigKey())
		compare(t, variant.ConfigKey(), fresh, committed, found, variant.Vars())
	}
}

func TestTheCommittedGoferProgramsDecideAsUpstreamsRulesDo(t *testing.T) {
	for _, variant := range goferVariants() {
		allow, deny := gofer.Rules(variant)
		fresh := program(allow, deny, seccomp.ProgramOptions{})
		committed, found := goferfilter.GetPrecompiled(variant.ConfigKey())
		compare(t, variant.ConfigKey(), fresh, committed, found, variant.Vars())
	}
}

// highestCall is beyond every system call number of Linux today (< 480).
const highestCall = 512

// walksPerCall is how many paths through each of the two programs are tried for
// each system call number. Tried on every comparison of a program: one flipped bit in
// its constant is found in 97 of 100; the rest are borders that decide nothing.
const walksPerCall = 400

func compare(t *testing.T, key string, fresh *seccomp.Program, committed pc.Program, found bool, vars pc.Values) {
	t.Helper()
	if !found {
		t.Fatalf("no committed program for %s: go generate ./precomp", key)
	}
	freshCode, _, err := fresh.Build()
	if err != nil {
		t.Fatal(err)
	}
	committedCode, err := committed.RenderInstructions(vars)
	if err != nil {
		t.Fatal(err)
	}
	if call, args, differ := difference(t, freshCode, committedCode); differ {
		t.Fatalf("%s:\nsystem call %d with %x is decided differently: go generate ./precomp", key, call, args)
	}
	foreign := make([]byte, 64)
	if action := verdict(t, assemble(t, committedCode), foreign); action != uint32(linux.SECCOMP_RET_KILL_PROCESS) {
		t.Fatalf("%s: a call of a foreign architecture gets %#x", key, action)
	}
}

// difference looks for a system call that two programs do not agree on.
func difference(t *testing.T, a, b []bpf.Instruction) (call uint32, args []byte, differ bool) {
	t.Helper()
	assembledA, assembledB := assemble(t, a), assemble(t, b)
	random := rand.New(rand.NewPCG(1, 2)) // fixed, so that a failure repeats
	for call := range uint32(highestCall) {
		for range walksPerCall {
			for _, guide := range [][]bpf.Instruction{a, b} {
				data := make([]byte, 64) // struct seccomp_data: nr, arch, ip, args[6]
				binary.NativeEndian.PutUint32(data[0:], call)
				binary.NativeEndian.PutUint32(data[4:], seccomp.LINUX_AUDIT_ARCH)
				walk(guide, data, random)
				if verdict(t, assembledA, data) != verdict(t, assembledB, data) {
					return call, data[16:], true
				}
			}
		}
	}
	return 0, nil, false
}

// walk follows one path through a program and fills in arguments that lead along
// it: at a comparison with an argument that is still free it tosses a coin
// whether the comparison shall hold, for exactly the constant or next to it.
func walk(code []bpf.Instruction, data []byte, random *rand.Rand) {
	const firstArgument = 16
	oneIn := 2 << random.IntN(3) // often for conditions that must all hold, seldom for long lists of alternatives
	fixed := map[uint32]bool{}
	var offset, mask uint32
	for pc := 0; pc < len(code); pc++ {
		instruction := code[pc]
		switch instruction.OpCode {
		case bpf.Ld | bpf.Abs | bpf.W:
			offset, mask = instruction.K, ^uint32(0)
		case bpf.Alu | bpf.And | bpf.K:
			mask &= instruction.K
		case bpf.Jmp | bpf.Ja:
			pc += int(instruction.K)
		case bpf.Jmp | bpf.Jeq | bpf.K, bpf.Jmp | bpf.Jgt | bpf.K, bpf.Jmp | bpf.Jge | bpf.K, bpf.Jmp | bpf.Jset | bpf.K:
			word := data[offset : offset+4]
			value := binary.NativeEndian.Uint32(word)
			if offset >= firstArgument && !fixed[offset] && random.IntN(oneIn) == 0 {
				value = value&^mask | instruction.K
				if instruction.OpCode == bpf.Jmp|bpf.Jset|bpf.K {
					value &= random.Uint32()
				}
				if random.IntN(8) == 0 {
					value += uint32(random.IntN(3) - 1)
				}
				binary.NativeEndian.PutUint32(word, value)
				fixed[offset] = true
			}
			if holds(instruction, value&mask) {
				pc += int(instruction.JumpIfTrue)
			} else {
				pc += int(instruction.JumpIfFalse)
			}
		default: // a return
			return
		}
	}
}

func holds(jump bpf.Instruction, value uint32) bool {
	switch jump.OpCode &^ (bpf.Jmp | bpf.K) {
	case bpf.Jeq:
		return value == jump.K
	case bpf.Jgt:
		return value > jump.K
	case bpf.Jge:
		return value >= jump.K
	default:
		return value&jump.K != 0
	}
}

func assemble(t *testing.T, code []bpf.Instruction) bpf.Program {
	t.Helper()
	assembled, err := bpf.Compile(code, false)
	if err != nil {
		t.Fatal(err)
	}
	return assembled
}

func verdict(t *testing.T, program bpf.Program, data []byte) uint32 {
	t.Helper()
	action, err := bpf.Exec[bpf.NativeEndian](program, data)
	if err != nil {
		t.Fatal(err)
	}
	return action
}
