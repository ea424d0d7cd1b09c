package main

import (
	"context"
	"crypto/tls"
	_ "embed"
	"fmt"
	"strconv"
	"time"

	"github.com/bufbuild/protocompile"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
)

//go:embed ateapi.proto
var source string

// A call that takes longer is a difference too: the public server gives up after 28 s.
const patience = 60 * time.Second

// Public benchmarks read the server's time from this trailer.
const elapsedTrailer = "x-server-elapsed-us"

// client calls the methods of ateapi.Control as ateapi.proto describes them.
type client struct {
	connection *grpc.ClientConn
	file       protoreflect.FileDescriptor
	control    protoreflect.ServiceDescriptor
}

func dial(ctx context.Context, address string) (*client, error) {
	compiler := protocompile.Compiler{Resolver: &protocompile.SourceResolver{
		Accessor: protocompile.SourceAccessorFromMap(map[string]string{"ateapi.proto": source}),
	}}
	files, err := compiler.Compile(ctx, "ateapi.proto")
	if err != nil {
		return nil, err
	}
	trusting := credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(trusting))
	if err != nil {
		return nil, err
	}
	return &client{connection, files[0], files[0].Services().ByName("Control")}, nil
}

// call sends a request, written in protobuf's text format. The error of a call that was answered is the server's;
// malformed says that the answer is none that the public server gives.
func (c *client) call(ctx context.Context, method, request string) (answer protoreflect.Message, refusal, malformed error) {
	described := c.control.Methods().ByName(protoreflect.Name(method))
	in, out := dynamicpb.NewMessage(described.Input()), dynamicpb.NewMessage(described.Output())
	if err := prototext.Unmarshal([]byte(request), in); err != nil {
		return nil, nil, fmt.Errorf("request %q: %w", request, err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var trailer metadata.MD
	refusal = c.connection.Invoke(ctx, fmt.Sprintf("/%s/%s", c.control.FullName(), method), in, out, grpc.Trailer(&trailer))
	elapsed := trailer.Get(elapsedTrailer)
	if len(elapsed) != 1 {
		return nil, refusal, fmt.Errorf("the trailer %s is there %d times, not once (the call's error: %v)", elapsedTrailer, len(elapsed), refusal)
	}
	if _, err := strconv.ParseUint(elapsed[0], 10, 64); err != nil {
		return nil, refusal, fmt.Errorf("the trailer %s is %q, not a number", elapsedTrailer, elapsed[0])
	}
	return out, refusal, known(out)
}

// known refuses fields that the public API does not have.
func known(message protoreflect.Message) error {
	if unknown := message.GetUnknown(); len(unknown) > 0 {
		return fmt.Errorf("%s carries fields that the public API does not have: %x", message.Descriptor().FullName(), unknown)
	}
	var err error
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.Message() == nil || field.IsMap():
		case field.IsList():
			for i := 0; i < value.List().Len() && err == nil; i++ {
				err = known(value.List().Get(i).Message())
			}
		default:
			err = known(value.Message())
		}
		return err == nil
	})
	return err
}
