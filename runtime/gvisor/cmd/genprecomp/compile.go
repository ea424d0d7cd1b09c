package main

import (
	"fmt"
	_ "unsafe" // for go:linkname

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/seccomp"
	pc "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	_ "gvisor.dev/gvisor/pkg/sentry/platform/systrap" // registers the one platform we run on
	sentry "gvisor.dev/gvisor/runsc/boot/filter/config"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter/config"
)

// Only the unexported rules() take placeholders for values known at run time (pid,
// control socket), and upstream's exported entry point calls them for every variant
// it ships: more than a minute instead of a quarter of a second. The linker finds their
// bodies by name; rules.s is there for that.

//go:linkname sentryRules gvisor.dev/gvisor/runsc/boot/filter/config.rules
func sentryRules(sentry.Options, pc.Values) (allow, deny seccomp.SyscallRules)

//go:linkname goferRules gvisor.dev/gvisor/runsc/fsgofer/filter/config.rules
func goferRules(gofer.Options, pc.Values) (allow, deny seccomp.SyscallRules)

// sentryVariants lists the configurations a sentry of ours may run in: systrap,
// netstack or no network, no device proxies; with and without direct file access.
func sentryVariants() ([]sentry.Options, error) {
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		return nil, err
	}
	var variants []sentry.Options
	for _, info := range systrap.PrecompiledSeccompInfo() {
		for _, directFS := range []bool{false, true} {
			variants = append(variants, sentry.Options{Platform: info, HostFilesystem: directFS})
		}
	}
	return variants, nil
}

// goferVariants lists every combination of what a template can ask of its gofer.
func goferVariants() []gofer.Options {
	const switches = 4
	var variants []gofer.Options
	for bits := range 1 << switches {
		variants = append(variants, gofer.Options{
			UDSOpenEnabled:   bits&1 != 0,
			UDSCreateEnabled: bits&2 != 0,
			DirectFS:         bits&4 != 0,
			LisafsNeeded:     bits&8 != 0,
		})
	}
	return variants
}

func compileSentry(opt sentry.Options) (pc.Program, error) {
	return compile(opt.ConfigKey(), opt.Vars(), func(vars pc.Values) *seccomp.Program {
		allow, deny := sentryRules(opt, vars)
		allowKillItself(allow, vars)
		return program(allow, deny, sentry.SeccompOptions(opt))
	})
}

// allowKillItself lets the sentry send SIGKILL to itself, its last act when a stub
// process was killed. Upstream's rule for it names os.Getpid(): right when rules
// are compiled where they are installed, but here it is the generator's pid.
func allowKillItself(allow seccomp.SyscallRules, vars pc.Values) {
	allow.Remove(unix.SYS_RT_TGSIGQUEUEINFO)
	allow.Set(unix.SYS_RT_TGSIGQUEUEINFO, seccomp.PerArg{
		seccomp.EqualTo(vars.GetUint64("self_pid")),
		seccomp.AnyValue{}, // thread
		seccomp.EqualTo(unix.SIGKILL),
	})
}

func compileGofer(opt gofer.Options) (pc.Program, error) {
	return compile(opt.ConfigKey(), opt.Vars(), func(vars pc.Values) *seccomp.Program {
		allow, deny := goferRules(opt, vars)
		return program(allow, deny, seccomp.ProgramOptions{})
	})
}

func compile(key string, vars pc.Values, build func(pc.Values) *seccomp.Program) (pc.Program, error) {
	var names []string
	for name := range vars {
		names = append(names, name)
	}
	compiled, err := pc.Precompile(key, names, build)
	if err != nil {
		return pc.Program{}, fmt.Errorf("compile %s: %w", key, err)
	}
	return compiled, nil
}

// program puts rules together as upstream's filter packages do when they find no
// precompiled program. The one difference: the action for a forbidden call is
// fixed instead of asked from the running kernel, which every kernel since 4.14
// answers in this way and an emulator does not answer at all.
func program(allow, deny seccomp.SyscallRules, options seccomp.ProgramOptions) *seccomp.Program {
	options.DefaultAction = seccomp.KillProcess
	return &seccomp.Program{
		RuleSets: []seccomp.RuleSet{
			{Rules: deny.Copy()},
			{Rules: allow.Copy(), Action: seccomp.Allow},
		},
		Options: options,
	}
}
