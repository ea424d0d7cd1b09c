package main

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// compareDescriptors asks the server what it serves, in both versions of the reflection protocol, and holds that against
// ateapi.proto: also the fields and methods that the walk does not touch.
func (c *client) compareDescriptors(ctx context.Context) error {
	for _, version := range []string{"v1", "v1alpha"} {
		theirs, err := c.reflected(ctx, version)
		if err != nil {
			return fmt.Errorf("reflection %s: %w", version, err)
		}
		ours, served := describe(c.file), describe(theirs)
		for _, line := range ours {
			if !slices.Contains(served, line) {
				return fmt.Errorf("reflection %s: the server does not have %q", version, line)
			}
		}
		for _, line := range served {
			if !slices.Contains(ours, line) {
				return fmt.Errorf("reflection %s: the server has %q, which the public API has not", version, line)
			}
		}
		fmt.Printf("ok  reflection %s: ateapi.Control and ateapi.SessionIdentity with all %d parts\n", version, len(ours))
	}
	return nil
}

func (c *client) reflected(ctx context.Context, version string) (protoreflect.FileDescriptor, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	// The two versions differ in their package's name alone, so the messages of one speak both.
	method := fmt.Sprintf("/grpc.reflection.%s.ServerReflection/ServerReflectionInfo", version)
	stream, err := c.connection.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return nil, err
	}
	ask := func(request *reflection.ServerReflectionRequest) (*reflection.ServerReflectionResponse, error) {
		// What went wrong with a send is told by the receive that follows.
		_ = stream.SendMsg(request)
		response := new(reflection.ServerReflectionResponse)
		return response, stream.RecvMsg(response)
	}
	listed, err := ask(&reflection.ServerReflectionRequest{
		MessageRequest: &reflection.ServerReflectionRequest_ListServices{ListServices: "*"},
	})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, service := range listed.GetListServicesResponse().GetService() {
		names = append(names, service.GetName())
	}
	for _, wanted := range []string{"ateapi.Control", "ateapi.SessionIdentity"} {
		if !slices.Contains(names, wanted) {
			return nil, fmt.Errorf("%s is not among the services %q", wanted, names)
		}
	}
	found, err := ask(&reflection.ServerReflectionRequest{
		MessageRequest: &reflection.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "ateapi.Control"},
	})
	if err != nil {
		return nil, err
	}
	files := found.GetFileDescriptorResponse().GetFileDescriptorProto()
	if len(files) == 0 {
		return nil, fmt.Errorf("no file has ateapi.Control: %v", found.GetErrorResponse())
	}
	file := new(descriptorpb.FileDescriptorProto)
	if err := proto.Unmarshal(files[0], file); err != nil {
		return nil, err
	}
	return protodesc.NewFile(file, nil)
}

// describe has one line for every part of a file that is seen on the wire.
func describe(file protoreflect.FileDescriptor) []string {
	lines := describeTypes(file.Messages(), file.Enums())
	for i := range file.Services().Len() {
		methods := file.Services().Get(i).Methods()
		for j := range methods.Len() {
			method := methods.Get(j)
			line := fmt.Sprintf("rpc %s(%s) returns (%s)", method.FullName(), method.Input().FullName(), method.Output().FullName())
			if method.IsStreamingClient() || method.IsStreamingServer() {
				line += " streaming"
			}
			lines = append(lines, line)
		}
	}
	return lines
}

func describeTypes(messages protoreflect.MessageDescriptors, enums protoreflect.EnumDescriptors) []string {
	var lines []string
	for i := range messages.Len() {
		message := messages.Get(i)
		lines = append(lines, fmt.Sprintf("message %s", message.FullName()))
		for j := range message.Fields().Len() {
			field := message.Fields().Get(j)
			line := fmt.Sprintf("%s %s %s = %d", field.Cardinality(), field.Kind(), field.FullName(), field.Number())
			switch {
			case field.Message() != nil:
				line += fmt.Sprintf(" of %s", field.Message().FullName())
			case field.Enum() != nil:
				line += fmt.Sprintf(" of %s", field.Enum().FullName())
			}
			if oneof := field.ContainingOneof(); oneof != nil {
				line += fmt.Sprintf(" in %s", oneof.FullName())
			}
			lines = append(lines, line)
		}
		lines = append(lines, describeTypes(message.Messages(), message.Enums())...)
	}
	for i := range enums.Len() {
		values := enums.Get(i).Values()
		for j := range values.Len() {
			lines = append(lines, fmt.Sprintf("%s = %d in %s", values.Get(j).Name(), values.Get(j).Number(), enums.Get(i).FullName()))
		}
	}
	return lines
}
