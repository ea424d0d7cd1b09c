package main

import (
	cryptorand "crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// app is everything that a snapshot has to carry.
type app struct {
	file        countFile
	identityDir string // written by the platform, anew at each launch
	nonce       string // drawn once, so it tells a restored process from a restarted one
	tick        time.Duration
	exit        func(code int)

	mu     sync.Mutex
	memory int64
	launch launch
	seeded *rand.Rand
	eaten  [][]byte
	kept   []net.Conn
}

func newApp(countDir, identityDir string, exit func(code int)) *app {
	return &app{
		file:        countFile{dir: countDir},
		identityDir: identityDir,
		nonce:       hex.EncodeToString(randomBytes(8)),
		tick:        100 * time.Millisecond,
		exit:        exit,
		seeded:      rand.New(rand.NewPCG(randomSeed(), randomSeed())),
	}
}

func (a *app) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", a.count)
	mux.HandleFunc("POST /{$}", a.count) // as GET, but nobody on the way may send it twice
	mux.HandleFunc("GET /peek", a.peek)
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /stream", a.stream)
	mux.HandleFunc("POST /echo", echo)
	mux.HandleFunc("GET /ws", echoWebSocket)
	mux.HandleFunc("GET /random", a.random)
	mux.HandleFunc("GET /time", now)
	mux.HandleFunc("POST /exit", a.leave) // sent twice it would end the next one, too
	mux.HandleFunc("GET /eat", a.eat)
	mux.HandleFunc("GET /dial", a.dial)
	mux.HandleFunc("GET /poke", a.poke)
	mux.HandleFunc("GET /resolve", resolve)
	return mux
}

type answer struct {
	Actor      string `json:"actor"`
	Memory     int64  `json:"memory"`
	File       int64  `json:"file"`
	Nonce      string `json:"nonce"`
	Launch     string `json:"launch"` // as the nonce, but drawn anew at each start and restore
	Generation uint64 `json:"generation"`
	Host       string `json:"host"`
}

func (a *app) count(w http.ResponseWriter, r *http.Request) { a.answer(w, r, 1) }

func (a *app) peek(w http.ResponseWriter, r *http.Request) { a.answer(w, r, 0) }

func (a *app) answer(w http.ResponseWriter, r *http.Request, step int64) {
	said, err := a.advance(step)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	said.Actor, said.Host = a.identity("actor-id"), r.Host
	writeJSON(w, said)
}

// launch is one life of the process on the platform: from one start or restore to the next.
type launch struct {
	generation uint64
	nonce      string // drawn anew by each, so two that claim the same generation give themselves away
}

// advance moves both counts together or, when the file cannot be written, neither.
func (a *app) advance(step int64) (answer, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	generation, _ := strconv.ParseUint(a.identity("generation"), 10, 64) // 0 outside the platform
	if a.launch.nonce == "" || a.launch.generation != generation {
		a.launch = launch{generation, hex.EncodeToString(randomBytes(8))}
	}
	file, err := a.file.add(step)
	if err != nil {
		return answer{}, err
	}
	a.memory += step
	return answer{Memory: a.memory, File: file, Nonce: a.nonce, Launch: a.launch.nonce, Generation: generation}, nil
}

// identity reads a file at each request, since a launch rewrites it under a running process.
func (a *app) identity(name string) string {
	content, _ := os.ReadFile(filepath.Join(a.identityDir, name))
	return strings.TrimSpace(string(content))
}

func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	encoder.Encode(value) // fails only when the client is gone
}

func randomBytes(n int) []byte {
	bytes := make([]byte, n)
	cryptorand.Read(bytes) // never fails: it ends the process instead
	return bytes
}

func randomSeed() uint64 {
	return binary.NativeEndian.Uint64(randomBytes(8))
}
