//go:build tools

// Package tools pins upstream's own runsc in go.mod: the stock build is
// `go build gvisor.dev/gvisor/runsc` in this module.
package tools

import _ "gvisor.dev/gvisor/runsc"
