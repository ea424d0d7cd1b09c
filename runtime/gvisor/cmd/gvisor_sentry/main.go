// Command gvisor_sentry is the part of runsc that runs as the sandbox. When runsc
// finds it in gvisor-bin/ beside itself it boots sandboxes with it; runsc refuses
// it if it carries another version label.
package main

import (
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/gvisorbinaries"

	"ate.dev/runtime/gvisor/internal/boot"
	_ "ate.dev/runtime/gvisor/precomp"
)

func main() {
	cli.Run(&gvisorbinaries.GvisorSentry, map[util.SubCommand]string{
		new(boot.Command):     "internal",
		new(sentrycmd.Umount): "internal",
	}, nil)
}
