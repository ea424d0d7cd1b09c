package main

import (
	"bufio"
	"log"
	"net"
	"net/http"
	"time"
)

// logged writes one line per request, when it ends.
func logged(logger *log.Logger, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		started := time.Now()
		recorder := &statusRecorder{ResponseWriter: w, status: http.StatusOK}
		defer func() {
			logger.Printf("%s %s %d %v", r.Method, r.RequestURI, recorder.status, time.Since(started).Round(time.Microsecond))
		}()
		next.ServeHTTP(recorder, r)
	})
}

type statusRecorder struct {
	http.ResponseWriter
	status int
}

func (s *statusRecorder) WriteHeader(status int) {
	s.status = status
	s.ResponseWriter.WriteHeader(status)
}

func (s *statusRecorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	s.status = http.StatusSwitchingProtocols
	return http.NewResponseController(s.ResponseWriter).Hijack()
}

// Unwrap lets http.ResponseController find what this type does not implement.
func (s *statusRecorder) Unwrap() http.ResponseWriter {
	return s.ResponseWriter
}
