// Command public-client walks an actor through its life with nothing but the public API of 30 June 2026: its own
// descriptors (ateapi.proto), TLS without verification as public clients have it, and the codes and texts that clients
// compare. It says each step, and ends at the first difference with a sentence that names it.
//
//	public-client --addr 127.0.0.1:8443 --template demo/counter
//
// The template must exist and be ready, with a free worker; the atespace and the actor must not.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
)

func main() {
	address := flag.String("addr", "127.0.0.1:8443", "`host:port` of the API")
	atespace := flag.String("atespace", "public-client", "atespace to make and delete")
	template := flag.String("template", "demo/counter", "`namespace/name` of a template that is ready")
	actor := flag.String("actor", "walker", "actor to make and delete")
	flag.Parse()
	namespace, name, both := strings.Cut(*template, "/")
	if flag.NArg() > 0 || !both {
		flag.Usage()
		os.Exit(2)
	}

	ctx := context.Background()
	api, err := dial(ctx, *address)
	if err == nil {
		err = api.compareDescriptors(ctx)
	}
	if err == nil {
		err = (&walk{api: api, atespace: *atespace, actor: *actor, namespace: namespace, template: name}).run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "public-client:", err)
		os.Exit(1)
	}
	fmt.Println("every step as the public API has it")
}
