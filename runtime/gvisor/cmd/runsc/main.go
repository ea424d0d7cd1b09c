// Command runsc is upstream's runsc, unpatched, with what upstream's release has
// and a plain `go build` lacks (precompiled seccomp programs, sidecars), a
// collector tuned for restores, and without what we never call: 47 of the 83 MB
// are a program that stores checkpoints in clouds.
package main

import (
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"

	"ate.dev/runtime/gvisor/internal/boot"
	_ "ate.dev/runtime/gvisor/precomp"
)

func main() {
	cli.Run(nil, map[util.SubCommand]string{
		new(cmd.Checkpoint):   "",
		new(cmd.Create):       "",
		new(cmd.Delete):       "",
		new(cmd.Exec):         "",
		new(cmd.FSCheckpoint): "",
		new(cmd.Kill):         "",
		new(cmd.List):         "",
		new(cmd.Pause):        "",
		new(cmd.Restore):      "",
		new(cmd.Resume):       "",
		new(cmd.Run):          "",
		new(cmd.Start):        "",
		new(cmd.State):        "",
		new(cmd.Wait):         "",

		new(cmd.Debug):    "debug",
		new(cmd.Features): "debug",

		// What runsc starts as its own children. Boot is here too, so that this
		// binary works without its sidecars.
		new(boot.Command):     "internal",
		new(cmd.Gofer):        "internal",
		new(sentrycmd.Umount): "internal",
	}, nil)
}
