package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// client is the other side, written from the protocol and not from the server's code.
type client struct {
	t *testing.T
	net.Conn
	*bufio.Reader
}

func (c client) Read(p []byte) (int, error) { return c.Reader.Read(p) }

func connect(t *testing.T) client {
	t.Helper()
	f := start(t, t.TempDir(), t.TempDir())
	connection, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	// Key and answer are the example of RFC 6455, section 1.3.
	fmt.Fprint(connection, "GET /ws HTTP/1.1\r\nHost: actor\r\nUpgrade: WebSocket\r\nConnection: keep-alive, Upgrade\r\n"+
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
	reader := bufio.NewReader(connection)
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		t.Fatal(err)
	}
	if response.StatusCode != 101 || response.Header.Get("Sec-WebSocket-Accept") != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" {
		t.Fatalf("handshake: %v %v", response.Status, response.Header)
	}
	return client{t, connection, reader}
}

// send writes a masked frame with the given first byte.
func (c client) send(first byte, payload []byte) {
	c.t.Helper()
	frame := []byte{first}
	switch n := len(payload); {
	case n < 126:
		frame = append(frame, 0x80|byte(n))
	case n < 1<<16:
		frame = binary.BigEndian.AppendUint16(append(frame, 0x80|126), uint16(n))
	default:
		frame = binary.BigEndian.AppendUint64(append(frame, 0x80|127), uint64(n))
	}
	mask := [4]byte{0x12, 0x34, 0x56, 0x78}
	frame = append(frame, mask[:]...)
	for i, b := range payload {
		frame = append(frame, b^mask[i%4])
	}
	if _, err := c.Conn.Write(frame); err != nil {
		c.t.Fatal(err)
	}
}

func (c client) expect(first byte, payload []byte) {
	c.t.Helper()
	var head [2]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		c.t.Fatal(err)
	}
	length := uint64(head[1])
	switch length {
	case 126:
		var extended uint16
		binary.Read(c, binary.BigEndian, &extended)
		length = uint64(extended)
	case 127:
		binary.Read(c, binary.BigEndian, &length)
	}
	got := make([]byte, length)
	if _, err := io.ReadFull(c, got); err != nil {
		c.t.Fatal(err)
	}
	if head[0] != first || !bytes.Equal(got, payload) {
		c.t.Fatalf("got frame %#x with %d bytes, expected %#x with %d", head[0], len(got), first, len(payload))
	}
}

// expectClose wants the code and then the end of the connection.
func (c client) expectClose(code uint16) {
	c.t.Helper()
	c.expect(0x88, binary.BigEndian.AppendUint16(nil, code))
	if _, err := c.ReadByte(); err != io.EOF {
		c.t.Fatalf("the connection is still open: %v", err)
	}
}

func TestMessagesOfEverySizeComeBack(t *testing.T) {
	c := connect(t)
	c.send(0x81, []byte("grüezi"))
	c.expect(0x81, []byte("grüezi"))
	for _, size := range []int{0, 125, 126, 0xFFFF, 0x10000, maxMessage} {
		payload := bytes.Repeat([]byte{0xFF}, size)
		c.send(0x82, payload)
		c.expect(0x82, payload)
	}
}

func TestFragmentsComeBackAsOneMessageAroundAPing(t *testing.T) {
	c := connect(t)
	c.send(0x01, []byte("gr\xc3")) // the fragment ends within a character
	c.send(0x89, []byte("alive?"))
	c.expect(0x8A, []byte("alive?"))
	c.send(0x8A, nil) // a pong nobody asked for is ignored
	c.send(0x00, []byte("\xbc"))
	c.send(0x80, []byte("ezi"))
	c.expect(0x81, []byte("grüezi"))
	c.send(0x82, []byte("next")) // nothing of the first message is left
	c.expect(0x82, []byte("next"))
}

func TestACloseIsAnsweredWithItsCode(t *testing.T) {
	c := connect(t)
	c.send(0x88, []byte{0x03, 0xE8})
	c.expectClose(1000)
}

func TestWhatTheProtocolForbidsEndsTheConnection(t *testing.T) {
	for name, test := range map[string]struct {
		code uint16
		act  func(client)
	}{
		"an unmasked frame":          {1002, func(c client) { c.Write([]byte{0x81, 0x01, 'x'}) }},
		"a reserved bit":             {1002, func(c client) { c.send(0xC1, nil) }},
		"an unknown opcode":          {1002, func(c client) { c.send(0x83, nil) }},
		"a fragmented ping":          {1002, func(c client) { c.send(0x09, nil) }},
		"a long ping":                {1002, func(c client) { c.send(0x89, make([]byte, 126)) }},
		"a fragment of nothing":      {1002, func(c client) { c.send(0x80, nil) }},
		"a message within a message": {1002, func(c client) { c.send(0x01, nil); c.send(0x81, nil) }},
		"half a close code":          {1002, func(c client) { c.send(0x88, []byte{3}) }},
		"text that is not text":      {1007, func(c client) { c.send(0x81, []byte{0xFF}) }},
		"a message beyond the limit": {1009, func(c client) { c.Write([]byte{0x82, 0xFF, 0, 0, 0, 0, 0, 0x10, 0, 1}) }},
		"fragments beyond the limit": {1009, func(c client) { c.send(0x02, make([]byte, maxMessage)); c.Write([]byte{0x80, 0x81}) }},
		"a length beyond any memory": {1009, func(c client) { c.Write([]byte{0x82, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF}) }},
	} {
		t.Run(name, func(t *testing.T) {
			c := connect(t)
			test.act(c)
			c.expectClose(test.code)
		})
	}
}

func TestAnotherVersionIsToldTheRightOne(t *testing.T) {
	f := start(t, t.TempDir(), t.TempDir())
	request, _ := http.NewRequest("GET", f.url+"/ws", nil)
	request.Header = http.Header{"Upgrade": {"websocket"}, "Connection": {"Upgrade"},
		"Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="}, "Sec-Websocket-Version": {"8"}}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != 426 || response.Header.Get("Sec-WebSocket-Version") != "13" {
		t.Fatalf("%v %v", response.Status, response.Header)
	}
}
