// Command counter is the demo actor: it counts requests in memory and in a file,
// so that anyone can see what survives a suspend. Its other routes let tests ask a
// sandbox the questions that matter: is entropy fresh, did the clock move, what
// can be reached, what happens on exit or out of memory.
//
//	counter [-port 80] [-grpc-port 50051]    environment: PORT, COUNTER_DIR
package main

import (
	"cmp"
	"flag"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	port := flag.String("port", cmp.Or(os.Getenv("PORT"), "80"), "TCP port to listen on, IPv4 and IPv6")
	grpcPort := flag.String("grpc-port", "50051", "TCP port of the gRPC echo")
	flag.Parse()
	logger := log.New(os.Stdout, "", log.LstdFlags|log.LUTC)

	app := newApp(cmp.Or(os.Getenv("COUNTER_DIR"), "/data"), "/run/ate", func(code int) {
		logger.Printf("asked to exit with %d", code)
		os.Exit(code)
	})
	listener, err := listen(*port)
	if err != nil {
		logger.Fatalf("cannot listen: %v", err)
	}
	grpcListener, err := listen(*grpcPort)
	if err != nil {
		logger.Fatalf("cannot listen: %v", err)
	}
	logger.Printf("listening on %v, gRPC on %v", listener.Addr(), grpcListener.Addr())

	server := &http.Server{Handler: logged(logger, app.routes()), ReadHeaderTimeout: 10 * time.Second}
	grpc := grpcServer()
	go grpc.Serve(grpcListener) // ends with the process
	// The first process of a container ignores signals that it does not ask for.
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-stop
		grpc.Close()
		server.Close()
	}()
	if err := server.Serve(listener); err != http.ErrServerClosed {
		logger.Fatalf("cannot serve: %v", err)
	}
}

// listen takes IPv4 and IPv6 on one socket: that is what Go does without a host.
func listen(port string) (net.Listener, error) {
	return net.Listen("tcp", net.JoinHostPort("", port))
}
