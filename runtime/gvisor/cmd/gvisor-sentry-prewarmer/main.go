// Command gvisor-sentry-prewarmer is executed by runsc ahead of the sentry:
//
//	gvisor-sentry-prewarmer BINARY ARGV0 [ARGUMENT...]
//
// The sentry moves its standard streams to descriptors 253-255. For that the
// kernel must grow the descriptor table from 64 to 256 entries, and in a process
// with several threads it first waits for an RCU grace period: 5 to 20 ms on a busy
// machine. A grown table survives exec, so this program grows it while there is
// only one thread, which takes 7 µs.
//
// A Go program never has only one thread: the runtime starts its monitor before
// main. The linker therefore enters at `entry` (-ldflags "-E main.entry"), plain
// assembly which makes four system calls and never starts the runtime. Assembly
// and not C, so that the pinned Go toolchain alone determines every byte.
package main

// entry grows the descriptor table and becomes BINARY. Exit code 127: it could not.
func entry()

func main() {
	panic("built without -ldflags '-E main.entry'")
}
