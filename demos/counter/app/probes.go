package main

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Limits of what a query may ask for; beyond them the answer is 400.
const (
	maxEvents   = 1_000_000
	maxExitCode = 255
	maxEatMiB   = 1 << 20 // a tebibyte: more than any sandbox gets, less than overflows
)

const dialTimeout = 2 * time.Second

// number reads a query parameter between 0 and limit, or answers 400 and returns false.
func number(w http.ResponseWriter, r *http.Request, name string, limit uint64) (int, bool) {
	value, err := strconv.ParseUint(r.URL.Query().Get(name), 10, 32)
	if err != nil || value > limit {
		http.Error(w, fmt.Sprintf("%s must be a number from 0 to %d", name, limit), http.StatusBadRequest)
		return 0, false
	}
	return int(value), true
}

// stream sends n server-sent events, the first at once and then one per tick.
func (a *app) stream(w http.ResponseWriter, r *http.Request) {
	n, ok := number(w, r, "n", maxEvents)
	if !ok {
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	ticker := time.NewTicker(a.tick)
	defer ticker.Stop()
	for i := range n {
		if i > 0 {
			select {
			case <-ticker.C:
			case <-r.Context().Done():
				return
			}
		}
		fmt.Fprintf(w, "id: %d\ndata: %d\n\n", i, i)
		if http.NewResponseController(w).Flush() != nil {
			return
		}
	}
}

// echo sends each piece back as it comes, so a body of any size or duration passes.
func echo(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	control.EnableFullDuplex() // else HTTP/1.1 ends the body at the first byte of the answer
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	piece := make([]byte, 32<<10)
	for {
		n, err := r.Body.Read(piece)
		w.Write(piece[:n])
		if control.Flush() != nil || err != nil {
			return
		}
	}
}

// random shows the two kinds of randomness: fresh bytes differ between clones of one
// snapshot, those of a generator in the process's memory do not.
func (a *app) random(w http.ResponseWriter, _ *http.Request) {
	a.mu.Lock()
	seeded := a.seeded.Uint64()
	a.mu.Unlock()
	writeJSON(w, struct {
		Fresh  string `json:"fresh"`
		Seeded string `json:"seeded"`
	}{hex.EncodeToString(randomBytes(8)), fmt.Sprintf("%016x", seeded)})
}

func now(w http.ResponseWriter, _ *http.Request) {
	fmt.Fprintln(w, time.Now().UnixNano())
}

func (a *app) leave(w http.ResponseWriter, r *http.Request) {
	code, ok := number(w, r, "code", maxExitCode)
	if !ok {
		return
	}
	fmt.Fprintf(w, "exiting with %d\n", code)
	http.NewResponseController(w).Flush()
	a.exit(code)
}

// eat keeps what it allocates; every page is written to, or the kernel would give none.
func (a *app) eat(w http.ResponseWriter, r *http.Request) {
	mib, ok := number(w, r, "mib", maxEatMiB)
	if !ok {
		return
	}
	meal := make([]byte, mib<<20)
	for i := 0; i < len(meal); i += 4096 {
		meal[i] = 1
	}
	a.mu.Lock()
	a.eaten = append(a.eaten, meal)
	a.mu.Unlock()
	fmt.Fprintf(w, "ate %d MiB\n", mib)
}

// dial connects and waits for the peer to say something: a connection that is taken and
// dropped is none. With keep=1 it stays open, over a suspend too, for poke to write to.
func (a *app) dial(w http.ResponseWriter, r *http.Request) {
	connection, err := net.DialTimeout("tcp", r.URL.Query().Get("addr"), dialTimeout)
	if err == nil {
		connection.SetReadDeadline(time.Now().Add(dialTimeout))
		_, err = connection.Read(make([]byte, 1))
		if r.URL.Query().Get("keep") == "1" {
			a.mu.Lock()
			a.kept = append(a.kept, connection)
			a.mu.Unlock()
		} else {
			connection.Close()
		}
	}
	if err != nil {
		fmt.Fprintf(w, "error: %v\n", err)
		return
	}
	fmt.Fprintln(w, "ok")
}

// poke writes to every connection that was kept and tells of each how that went.
func (a *app) poke(w http.ResponseWriter, _ *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, connection := range a.kept {
		connection.SetWriteDeadline(time.Now().Add(dialTimeout))
		_, err := connection.Write([]byte("poke"))
		fmt.Fprintln(w, cmp.Or(err, errors.New("ok")))
	}
}

func resolve(w http.ResponseWriter, r *http.Request) {
	addresses, err := net.DefaultResolver.LookupHost(r.Context(), r.URL.Query().Get("name"))
	if err != nil {
		fmt.Fprintf(w, "error: %v\n", err)
		return
	}
	fmt.Fprintln(w, strings.Join(addresses, " "))
}
