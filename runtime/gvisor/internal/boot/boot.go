// Package boot is runsc's `boot` command, the sentry, with a collector that suits
// a process whose heap is mostly made in one go: decoding a snapshot.
package boot

import (
	"context"
	"runtime/debug"

	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/flag"
)

// gcPercent lets the heap grow fivefold between collections, so that none runs
// while a snapshot is decoded: 10 ms less for a restore of 24 MB, 2 MB more per
// sandbox. It has to be set in code, as runsc clears the sentry's environment and
// with it GOGC. No other command holds a heap worth the memory.
const gcPercent = 400

// Command is upstream's command in all but the above.
type Command struct {
	sentrycmd.Boot
}

// Execute implements subcommands.Command.
func (c *Command) Execute(ctx context.Context, flags *flag.FlagSet, args ...any) subcommands.ExitStatus {
	debug.SetGCPercent(gcPercent)
	return c.Boot.Execute(ctx, flags, args...)
}
