package main

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
)

const (
	tooLong   = "must be no more than 63 characters"
	badFormat = "must start and end with a lower case alphanumeric character, and consist only of lower case alphanumeric characters or '-'"
	// Kubernetes' own words, with its two spaces.
	badKey   = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
	badValue = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)

// Names that no actor and no atespace can have, and what is said of them.
var badNames = []struct{ name, fault string }{
	{strings.Repeat("a", 64), tooLong},
	{"Upper", badFormat},
	{"-dash", badFormat},
	{"dash-", badFormat},
	{"un_der", badFormat},
}

// Selectors that no actor can have, and what is said of them.
func badSelectors() []struct{ selector, fault string } {
	entry := func(key, value string) string {
		return fmt.Sprintf("match_labels {key: %q value: %q} ", key, value)
	}
	var eleven strings.Builder
	for i := range 11 {
		eleven.WriteString(entry(fmt.Sprintf("key-%d", i), "value"))
	}
	selector := func(entries string) string { return " worker_selector {" + entries + "}" }
	return []struct{ selector, fault string }{
		{selector(eleven.String()), "worker_selector has 11 match_labels entries, exceeding the limit of 10"},
		{selector(entry("a b", "value")), `invalid worker_selector label key "a b": ` + badKey},
		{selector(entry("key", "a b")), `invalid worker_selector label value "a b" for key "key": ` + badValue},
	}
}

func (w *walk) refuseAtespaces(ctx context.Context) {
	for _, method := range []string{"CreateAtespace", "GetAtespace", "DeleteAtespace"} {
		w.refused(ctx, method, "", codes.InvalidArgument, "name is required")
		for _, bad := range badNames {
			w.refused(ctx, method, fmt.Sprintf("name: %q", bad.name), codes.InvalidArgument, "invalid atespace: %s", bad.fault)
		}
	}
	for _, method := range []string{"GetAtespace", "DeleteAtespace"} {
		w.refused(ctx, method, fmt.Sprintf("name: %q", w.atespace), codes.NotFound, "Atespace %s not found", w.atespace)
	}
}

// refuseCreation adds one part after the other, in the order in which they are missed.
func (w *walk) refuseCreation(ctx context.Context) {
	invalid := func(request, format string, arguments ...any) {
		w.refused(ctx, "CreateActor", request, codes.InvalidArgument, format, arguments...)
	}
	invalid("", "actor_template_namespace is required")
	invalid(fmt.Sprintf("actor_template_name: %q", w.template), "actor_template_namespace is required")
	from := fmt.Sprintf("actor_template_namespace: %q ", w.namespace)
	invalid(from, "actor_template_name is required")
	from += fmt.Sprintf("actor_template_name: %q ", w.template)
	invalid(from, "actor_id is required")
	invalid(from+fmt.Sprintf("actor_ref {atespace: %q}", w.atespace), "actor_id is required")
	for _, bad := range badNames {
		invalid(from+fmt.Sprintf("actor_ref {name: %q}", bad.name), "invalid actor_id: %s", bad.fault)
	}
	invalid(from+fmt.Sprintf("actor_ref {name: %q}", w.actor), "atespace is required")
	for _, bad := range badNames {
		invalid(from+fmt.Sprintf("actor_ref {name: %q atespace: %q}", w.actor, bad.name), "invalid atespace: %s", bad.fault)
	}
	nowhere := "actor_template_namespace: \"no-such\" actor_template_name: \"template\" " + w.ref(w.actor)
	for _, bad := range badSelectors() {
		invalid(nowhere+bad.selector, "%s", bad.fault)
	}
	w.refused(ctx, "CreateActor", nowhere, codes.FailedPrecondition, "ActorTemplate no-such/template not found")
	w.refused(ctx, "CreateActor", w.creation(w.actor), codes.FailedPrecondition, "Atespace %s not found", w.atespace)
}

// refuseReferences names actors by halves, wrongly, and before they are there.
func (w *walk) refuseReferences(ctx context.Context) {
	invalid := func(method, request, format string, arguments ...any) {
		w.refused(ctx, method, request, codes.InvalidArgument, format, arguments...)
	}
	halves := func(method, nameless string) {
		invalid(method, "", "%s", nameless)
		invalid(method, fmt.Sprintf("actor_ref {atespace: %q}", w.atespace), "%s", nameless)
		invalid(method, fmt.Sprintf("actor_ref {name: %q}", w.actor), "atespace is required")
		w.refused(ctx, method, w.ref(w.actor), codes.NotFound, "Actor %s not found", w.actor)
	}
	for _, method := range []string{"GetActor", "ResumeActor", "SuspendActor", "PauseActor"} {
		halves(method, "id is required")
		// These check no format: what cannot be is not there.
		w.refused(ctx, method, w.ref("Upper"), codes.NotFound, "Actor Upper not found")
	}
	halves("DeleteActor", "actor_id is required")
	halves("UpdateActor", "actor_id is required")
	w.refused(ctx, "UpdateActor", w.ref("Upper"), codes.NotFound, "Actor Upper not found")
	for _, bad := range badNames {
		invalid("DeleteActor", fmt.Sprintf("actor_ref {name: %q}", bad.name), "invalid actor_id: %s", bad.fault)
		invalid("UpdateActor", fmt.Sprintf("actor_ref {name: %q atespace: %q}", w.actor, bad.name), "invalid atespace: %s", bad.fault)
		invalid("ListActors", fmt.Sprintf("atespace: %q", bad.name), "invalid atespace: %s", bad.fault)
	}
	for _, bad := range badSelectors() {
		invalid("UpdateActor", w.ref(w.actor)+bad.selector, "%s", bad.fault)
	}
	invalid("ListActors", "page_size: -1", "page_size cannot be negative")
	invalid("ListActors", "page_size: 1001", "page_size 1001 exceeds maximum page size 1000")
}
