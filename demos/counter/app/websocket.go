package main

import (
	"bufio"
	"bytes"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"
)

// A WebSocket (RFC 6455) that sends every message back. By hand, so that the demo
// has no dependency: fragments, pings and closing, but no extensions.
//
//	 0               1               2               3
//	+-+-+-+-+-------+-+-------------+-------------------------------+
//	|F|R|R|R| opcode|M| length 7    | 126: 16 bits more, 127: 64    |
//	|I|S|S|S|       |A|             |                               |
//	|N|V|V|V|       |S|             | then masking key (client), payload
//	+-+-+-+-+-------+-+-------------+-------------------------------+

type opcode byte

const (
	opContinuation opcode = 0x0
	opText         opcode = 0x1
	opBinary       opcode = 0x2
	opClose        opcode = 0x8
	opPing         opcode = 0x9
	opPong         opcode = 0xA
)

func (o opcode) isControl() bool { return o&0x8 != 0 }

// Reasons to end a connection, as sent to the peer.
type closeCode uint16

const (
	closeProtocolError closeCode = 1002
	closeInvalidText   closeCode = 1007
	closeTooBig        closeCode = 1009
)

func (c closeCode) Error() string { return fmt.Sprintf("websocket: close %d", uint16(c)) }

const (
	maxMessage        = 1 << 20 // bytes held in memory for one peer; more ends it with 1009
	maxControlPayload = 125     // of the protocol
)

func echoWebSocket(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get("Sec-WebSocket-Key")
	nonce, err := base64.StdEncoding.DecodeString(key)
	if !hasToken(r.Header, "Connection", "upgrade") || !hasToken(r.Header, "Upgrade", "websocket") || err != nil || len(nonce) != 16 {
		http.Error(w, "this is a WebSocket: connect with one", http.StatusBadRequest)
		return
	}
	if r.Header.Get("Sec-WebSocket-Version") != "13" {
		w.Header().Set("Sec-WebSocket-Version", "13")
		http.Error(w, "unsupported WebSocket version", http.StatusUpgradeRequired)
		return
	}
	connection, stream, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer connection.Close()
	fmt.Fprintf(stream, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n",
		acceptKey(key))
	peer := webSocket{stream}
	if stream.Flush() != nil {
		return
	}
	if reason := closeCode(0); errors.As(peer.echo(), &reason) {
		peer.write(opClose, binary.BigEndian.AppendUint16(nil, uint16(reason)))
	}
}

func acceptKey(key string) string {
	digest := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	return base64.StdEncoding.EncodeToString(digest[:])
}

func hasToken(header http.Header, name, token string) bool {
	for _, value := range header.Values(name) {
		for field := range strings.SplitSeq(value, ",") {
			if strings.EqualFold(strings.TrimSpace(field), token) {
				return true
			}
		}
	}
	return false
}

type webSocket struct {
	stream *bufio.ReadWriter
}

type frame struct {
	final   bool
	opcode  opcode
	payload []byte
}

// echo returns when the connection is over; a closeCode is for the peer to know.
func (s webSocket) echo() error {
	var message bytes.Buffer
	kind := opContinuation // of the message being received; continuation: none is
	for {
		frame, err := s.read(maxMessage - message.Len())
		if err != nil {
			return err
		}
		switch frame.opcode {
		case opClose:
			if len(frame.payload) == 1 { // half of a close code
				return closeProtocolError
			}
			return s.write(opClose, frame.payload)
		case opPing:
			if err := s.write(opPong, frame.payload); err != nil {
				return err
			}
			continue
		case opPong:
			continue
		case opContinuation:
			if kind == opContinuation {
				return closeProtocolError
			}
		case opText, opBinary:
			if kind != opContinuation {
				return closeProtocolError
			}
			kind = frame.opcode
		default:
			return closeProtocolError
		}
		message.Write(frame.payload)
		if !frame.final {
			continue
		}
		if kind == opText && !utf8.Valid(message.Bytes()) {
			return closeInvalidText
		}
		if err := s.write(kind, message.Bytes()); err != nil {
			return err
		}
		message.Reset()
		kind = opContinuation
	}
}

// read takes one frame, whose payload may have up to limit bytes.
func (s webSocket) read(limit int) (frame, error) {
	var head [2]byte
	if _, err := io.ReadFull(s.stream, head[:]); err != nil {
		return frame{}, err
	}
	f := frame{final: head[0]&0x80 != 0, opcode: opcode(head[0] & 0x0F)}
	reserved, masked, length := head[0]&0x70 != 0, head[1]&0x80 != 0, uint64(head[1]&0x7F)
	if reserved || !masked || f.opcode.isControl() && (!f.final || length > maxControlPayload) {
		return frame{}, closeProtocolError
	}
	switch length {
	case 126:
		var extended uint16
		if err := binary.Read(s.stream, binary.BigEndian, &extended); err != nil {
			return frame{}, err
		}
		length = uint64(extended)
	case 127:
		if err := binary.Read(s.stream, binary.BigEndian, &length); err != nil {
			return frame{}, err
		}
	}
	if !f.opcode.isControl() && length > uint64(limit) {
		return frame{}, closeTooBig
	}
	var mask [4]byte
	if _, err := io.ReadFull(s.stream, mask[:]); err != nil {
		return frame{}, err
	}
	f.payload = make([]byte, length)
	if _, err := io.ReadFull(s.stream, f.payload); err != nil {
		return frame{}, err
	}
	for i := range f.payload {
		f.payload[i] ^= mask[i%4]
	}
	return f, nil
}

// write sends one unfragmented frame.
func (s webSocket) write(op opcode, payload []byte) error {
	head := []byte{0x80 | byte(op)}
	switch n := len(payload); {
	case n <= maxControlPayload:
		head = append(head, byte(n))
	case n <= 0xFFFF:
		head = binary.BigEndian.AppendUint16(append(head, 126), uint16(n))
	default:
		head = binary.BigEndian.AppendUint64(append(head, 127), uint64(n))
	}
	s.stream.Write(head)
	s.stream.Write(payload)
	return s.stream.Flush() // reports what the two above met
}
