package main

import "net/http"

// grpcServer takes HTTP/2 without TLS, as gRPC clients speak it inside a cluster, and
// answers every call with the messages that it is sent.
func grpcServer() *http.Server {
	server := &http.Server{Handler: http.HandlerFunc(grpcEcho), Protocols: new(http.Protocols)}
	server.Protocols.SetUnencryptedHTTP2(true)
	return server
}

func grpcEcho(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Trailer", "Grpc-Status")
	echo(w, r)
	w.Header().Set("Grpc-Status", "0")
}
