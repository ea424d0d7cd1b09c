package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

type fixture struct {
	*app
	url  string
	exit chan int
}

func start(t *testing.T, countDir, identityDir string) fixture {
	t.Helper()
	f := fixture{exit: make(chan int, 1)}
	f.app = newApp(countDir, identityDir, func(code int) { f.exit <- code })
	f.app.tick = time.Millisecond
	server := httptest.NewServer(logged(log.New(io.Discard, "", 0), f.app.routes()))
	t.Cleanup(server.Close)
	f.url = server.URL
	return f
}

func (f fixture) get(t *testing.T, path string) (int, string) {
	t.Helper()
	return f.send(t, http.MethodGet, path)
}

func (f fixture) send(t *testing.T, method, path string) (int, string) {
	t.Helper()
	request, err := http.NewRequest(method, f.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

func (f fixture) ask(t *testing.T, path string) answer {
	t.Helper()
	status, body := f.get(t, path)
	if status != http.StatusOK || !strings.HasSuffix(body, "}\n") || strings.Count(body, "\n") != 1 {
		t.Fatalf("GET %s: %d %q is not one line of JSON", path, status, body)
	}
	var got answer
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestEveryRequestCountsInMemoryAndInTheFile(t *testing.T) {
	dir := t.TempDir()
	f := start(t, dir, t.TempDir())
	for want := int64(1); want <= 3; want++ {
		if got := f.ask(t, "/"); got.Memory != want || got.File != want {
			t.Fatalf("request %d answered %+v", want, got)
		}
	}
	entries, _ := os.ReadDir(dir)
	if len(entries) != 1 || entries[0].Name() != "count" {
		t.Fatalf("the directory holds more than the count: %v", entries)
	}
}

func TestAPeekDoesNotCount(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	f.ask(t, "/")
	f.ask(t, "/peek")
	if got := f.ask(t, "/peek"); got.Memory != 1 || got.File != 1 {
		t.Fatalf("after one request and a peek: %+v", got)
	}
}

func TestARestartForgetsMemoryAndKeepsTheFile(t *testing.T) {
	dir := t.TempDir()
	before := start(t, dir, t.TempDir()).ask(t, "/")
	after := start(t, dir, t.TempDir()).ask(t, "/")
	if after.Memory != 1 || after.File != 2 || after.Nonce == before.Nonce || len(after.Nonce) != 16 {
		t.Fatalf("before %+v, after %+v", before, after)
	}
}

func TestWithoutADirectoryTheFileCountIsMinusOne(t *testing.T) {
	f := start(t, filepath.Join(t.TempDir(), "missing"), t.TempDir())
	if got := f.ask(t, "/"); got.Memory != 1 || got.File != -1 {
		t.Fatalf("%+v", got)
	}
}

func TestABrokenCountFileIsAnErrorAndCountsNothing(t *testing.T) {
	dir := t.TempDir()
	os.WriteFile(filepath.Join(dir, "count"), []byte("many"), 0o644)
	f := start(t, dir, t.TempDir())
	if status, body := f.get(t, "/"); status != http.StatusInternalServerError {
		t.Fatalf("%d %s", status, body)
	}
	os.Remove(filepath.Join(dir, "count"))
	if got := f.ask(t, "/peek"); got.Memory != 0 {
		t.Fatalf("%+v", got)
	}
}

func TestIdentityIsReadAtEachRequest(t *testing.T) {
	identity := t.TempDir()
	f := start(t, t.TempDir(), identity)
	if got := f.ask(t, "/peek"); got.Actor != "" || got.Generation != 0 {
		t.Fatalf("without identity: %+v", got)
	}
	os.WriteFile(filepath.Join(identity, "actor-id"), []byte("demo/alice\n"), 0o644)
	os.WriteFile(filepath.Join(identity, "generation"), []byte("7\n"), 0o644)
	got := f.ask(t, "/peek")
	if got.Actor != "demo/alice" || got.Generation != 7 || got.Host != strings.TrimPrefix(f.url, "http://") {
		t.Fatalf("%+v", got)
	}
}

func TestEachLaunchHasANonceOfItsOwn(t *testing.T) {
	identity := t.TempDir()
	f := start(t, t.TempDir(), identity)
	one, same := f.ask(t, "/"), f.ask(t, "/")
	if one.Launch == "" || one.Launch != same.Launch {
		t.Fatalf("one launch: %+v and %+v", one, same)
	}
	os.WriteFile(filepath.Join(identity, "generation"), []byte("8\n"), 0o644)
	if next := f.ask(t, "/"); next.Launch == one.Launch || next.Nonce != one.Nonce {
		t.Fatalf("the next launch is %+v after %+v", next, one)
	}
}

func TestAStreamSendsItsEventsOneByOne(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	f.app.tick = time.Hour // only the first event comes: it must not wait for the others
	response, err := http.Get(f.url + "/stream?n=3")
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(response.Body).ReadString('\n')
	response.Body.Close()
	if err != nil || line != "id: 0\n" || response.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%q %v %v", line, err, response.Header)
	}

	f = start(t, t.TempDir(), t.TempDir())
	if _, body := f.get(t, "/stream?n=3"); strings.Count(body, "data: ") != 3 || !strings.HasSuffix(body, "data: 2\n\n") {
		t.Fatalf("%q", body)
	}
}

func TestAnEchoAnswersWhileTheBodyIsStillSent(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	body, sender := io.Pipe()
	go io.WriteString(sender, "first")
	response, err := http.Post(f.url+"/echo", "text/plain", body)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	go func() {
		sender.Write(make([]byte, 1<<20))
		sender.Close()
	}()
	got, err := io.ReadAll(response.Body)
	if err != nil || len(got) != 5+1<<20 || !strings.HasPrefix(string(got), "first") {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
}

func TestRandomBytesDiffer(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	_, one := f.get(t, "/random")
	_, other := f.get(t, "/random")
	var a, b struct{ Fresh, Seeded string }
	json.Unmarshal([]byte(one), &a)
	json.Unmarshal([]byte(other), &b)
	if len(a.Fresh) != 16 || len(a.Seeded) != 16 || a.Fresh == b.Fresh || a.Seeded == b.Seeded || a.Fresh == a.Seeded {
		t.Fatalf("%s%s", one, other)
	}
}

func TestTheClockIsInNanoseconds(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	before := time.Now().UnixNano()
	_, body := f.get(t, "/time")
	got, err := strconv.ParseInt(strings.TrimSpace(body), 10, 64)
	if err != nil || got < before || got > time.Now().UnixNano() {
		t.Fatalf("%q %v", body, err)
	}
}

func TestExitAnswersFirst(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	if status, _ := f.send(t, http.MethodPost, "/exit?code=7"); status != http.StatusOK {
		t.Fatal(status)
	}
	if code := <-f.exit; code != 7 {
		t.Fatal(code)
	}
}

func TestMemoryEatenIsKept(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	f.get(t, "/eat?mib=3")
	f.get(t, "/eat?mib=1")
	f.mu.Lock()
	defer f.mu.Unlock()
	total := 0
	for _, meal := range f.eaten {
		total += len(meal)
	}
	if total != 4<<20 || f.eaten[0][4096] != 1 {
		t.Fatal(total)
	}
}

func TestADialReportsSuccessAndFailure(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	greeter, _ := net.Listen("tcp", "127.0.0.1:0")
	defer greeter.Close()
	go func() {
		for greeting := "hello"; ; greeting = "" { // the second time it hangs up without a word
			connection, err := greeter.Accept()
			if err != nil {
				return
			}
			connection.Write([]byte(greeting))
			connection.Close()
		}
	}()
	if _, body := f.get(t, "/dial?addr="+greeter.Addr().String()); body != "ok\n" {
		t.Fatal(body)
	}
	if _, body := f.get(t, "/dial?addr="+greeter.Addr().String()); !strings.HasPrefix(body, "error: ") {
		t.Fatal(body)
	}
	closed, _ := net.Listen("tcp", "127.0.0.1:0")
	closed.Close()
	if _, body := f.get(t, "/dial?addr="+closed.Addr().String()); !strings.HasPrefix(body, "error: ") {
		t.Fatal(body)
	}
}

func TestWhatIsNotOfferedIsRefused(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	for path, want := range map[string]int{
		"/readyz":           http.StatusOK,
		"/nothing":          http.StatusNotFound,
		"/echo":             http.StatusMethodNotAllowed,
		"/exit?code=7":      http.StatusMethodNotAllowed,
		"/eat?mib=-1":       http.StatusBadRequest,
		"/stream?n=1000001": http.StatusBadRequest,
		"/ws":               http.StatusBadRequest,
	} {
		if status, body := f.get(t, path); status != want {
			t.Errorf("GET %s: %d %s", path, status, body)
		}
	}
	for _, path := range []string{"/exit?code=256", "/exit"} {
		if status, body := f.send(t, http.MethodPost, path); status != http.StatusBadRequest {
			t.Errorf("POST %s: %d %s", path, status, body)
		}
	}
}

func TestEveryRequestLogsOneLine(t *testing.T) {
	var lines bytes.Buffer
	handler := logged(log.New(&lines, "", 0), newApp(t.TempDir(), t.TempDir(), nil).routes())
	for _, path := range []string{"/?a=b", "/nothing"} {
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", path, nil))
	}
	got := strings.Split(strings.TrimSpace(lines.String()), "\n")
	if len(got) != 2 || !strings.HasPrefix(got[0], "GET /?a=b 200 ") || !strings.HasPrefix(got[1], "GET /nothing 404 ") {
		t.Fatalf("%q", got)
	}
}

func TestBothAddressFamiliesAreServed(t *testing.T) {
	listener, err := listen("0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	for _, loopback := range []string{"127.0.0.1", "::1"} {
		if probe, err := net.Listen("tcp", net.JoinHostPort(loopback, "0")); err != nil {
			t.Logf("this machine has no %s", loopback)
			continue
		} else {
			probe.Close()
		}
		connection, err := net.Dial("tcp", net.JoinHostPort(loopback, port))
		if err != nil {
			t.Fatal(err)
		}
		connection.Close()
	}
}
