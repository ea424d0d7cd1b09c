package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// walk goes through an actor's life. Its first difference ends it: what would follow is skipped.
type walk struct {
	api                                  *client
	atespace, actor, namespace, template string
	difference                           error
}

// want is what a field of an answer must be: a value, some value, or none.
type want struct{ path, value string }

const (
	some = "(some)"
	none = ""
)

func (w *walk) run(ctx context.Context) error {
	w.refuseAtespaces(ctx)
	w.refuseCreation(ctx)
	w.makeAtespace(ctx)
	w.refuseReferences(ctx)
	w.makeActor(ctx)
	w.turnPages(ctx)
	w.choosePool(ctx)
	w.wakeAndSuspend(ctx)
	w.pause(ctx)
	w.boot(ctx)
	w.clear(ctx)
	return w.difference
}

func (w *walk) makeAtespace(ctx context.Context) {
	named := fmt.Sprintf("name: %q", w.atespace)
	w.answered(ctx, "CreateAtespace", named, want{"atespace.name", w.atespace})
	w.refused(ctx, "CreateAtespace", named, codes.AlreadyExists, "Atespace %s already exists", w.atespace)
	w.answered(ctx, "GetAtespace", named, want{"atespace.name", w.atespace})
	w.answered(ctx, "ListAtespaces", "", want{"atespaces[name=" + w.atespace + "].name", w.atespace})
	w.answered(ctx, "ListActors", fmt.Sprintf("atespace: %q", w.atespace), want{"actors", none})
}

func (w *walk) makeActor(ctx context.Context) {
	asleep := []want{
		{"actor.actor_id", w.actor},
		{"actor.atespace", w.atespace},
		{"actor.version", "1"},
		{"actor.status", "STATUS_SUSPENDED"},
		{"actor.actor_template_namespace", w.namespace},
		{"actor.actor_template_name", w.template},
		{"actor.ateom_pod_name", none},
		{"actor.latest_snapshot_info", none},
	}
	w.answered(ctx, "CreateActor", w.creation(w.actor), asleep...)
	w.answered(ctx, "GetActor", w.ref(w.actor), asleep...)
	w.refused(ctx, "CreateActor", w.creation(w.actor), codes.AlreadyExists, "Actor %s already exists", w.actor)
	w.refused(ctx, "DeleteAtespace", fmt.Sprintf("name: %q", w.atespace), codes.FailedPrecondition, "Atespace %s is not empty", w.atespace)
	w.answered(ctx, "SuspendActor", w.ref(w.actor), asleep...)
	w.refused(ctx, "PauseActor", w.ref(w.actor), codes.Internal,
		"internal server error: actor is in PAUSING state but has no active worker")
}

// choosePool has the actor want a pool that is not there, and any again.
func (w *walk) choosePool(ctx context.Context) {
	w.answered(ctx, "UpdateActor", w.ref(w.actor)+` worker_selector {match_labels {key: "no-pool-has-this" value: "label"}}`,
		want{"actor.version", "2"}, want{"actor.worker_selector.match_labels", "no-pool-has-this:label"})
	w.refused(ctx, "ResumeActor", w.ref(w.actor), codes.FailedPrecondition,
		"no worker pool matches the template's sandboxClass and the template/actor selectors")
	w.answered(ctx, "UpdateActor", w.ref(w.actor),
		want{"actor.status", "STATUS_SUSPENDED"}, want{"actor.worker_selector.match_labels", none})
}

func (w *walk) wakeAndSuspend(ctx context.Context) {
	running := w.runs(ctx, w.actor, "")
	again := w.answered(ctx, "ResumeActor", w.ref(w.actor), want{"actor.status", "STATUS_RUNNING"})
	w.check("ResumeActor of a running actor", again,
		want{"actor.ateom_pod_name", field(running, "actor.ateom_pod_name")}, want{"actor.version", field(running, "actor.version")})
	w.answered(ctx, "ListActors", fmt.Sprintf("atespace: %q", w.atespace),
		want{"actors[actor_id=" + w.actor + "].status", "STATUS_RUNNING"})
	w.refused(ctx, "DeleteActor", w.ref(w.actor), codes.FailedPrecondition, "Actor %s is not suspended (status: STATUS_RUNNING)", w.actor)

	workers := w.answered(ctx, "ListWorkers", "")
	its := "workers[actor_atespace=" + w.atespace + "]."
	w.check("ListWorkers", workers,
		want{its + "worker_namespace", field(running, "actor.ateom_pod_namespace")},
		want{its + "worker_pool", field(running, "actor.worker_pool_name")},
		want{its + "worker_pod", field(running, "actor.ateom_pod_name")},
		want{its + "worker_pod_uid", field(running, "actor.ateom_pod_uid")},
		want{its + "ip", field(running, "actor.ateom_pod_ip")},
		want{its + "actor_namespace", w.namespace},
		want{its + "actor_template", w.template},
		want{its + "actor_id", w.actor},
		want{its + "node_name", some},
		want{its + "version", some})
	if free := field(workers, "workers[actor_id=].worker_pod"); free == none {
		w.refused(ctx, "ResumeActor", w.ref(w.second()), codes.FailedPrecondition, "no free workers available")
		w.answered(ctx, "GetActor", w.ref(w.second()), want{"actor.status", "STATUS_SUSPENDED"})
	}

	w.rests(ctx, "SuspendActor", w.actor, "STATUS_SUSPENDED",
		want{"actor.latest_snapshot_info.type", "SNAPSHOT_TYPE_EXTERNAL"},
		want{"actor.latest_snapshot_info.external.snapshot_uri_prefix", some})
	w.check("ListWorkers", w.answered(ctx, "ListWorkers", ""), want{its + "worker_pod", none})
}

func (w *walk) pause(ctx context.Context) {
	w.runs(ctx, w.actor, "")
	onNode := []want{
		{"actor.latest_snapshot_info.type", "SNAPSHOT_TYPE_LOCAL"},
		{"actor.latest_snapshot_info.local.snapshot_prefix", some},
		{"actor.latest_snapshot_info.local.node_vms_with_local_snapshots", some},
	}
	w.rests(ctx, "PauseActor", w.actor, "STATUS_PAUSED", onNode...)
	w.rests(ctx, "PauseActor", w.actor, "STATUS_PAUSED", onNode...)
	w.refused(ctx, "DeleteActor", w.ref(w.actor), codes.FailedPrecondition, "Actor %s is not suspended (status: STATUS_PAUSED)", w.actor)
	w.refused(ctx, "SuspendActor", w.ref(w.actor), codes.Internal,
		"internal server error: actor is in SUSPENDING state but has no active worker")
	w.runs(ctx, w.actor, "")
	w.rests(ctx, "SuspendActor", w.actor, "STATUS_SUSPENDED", want{"actor.latest_snapshot_info.type", "SNAPSHOT_TYPE_EXTERNAL"})
}

// turnPages lists two actors one by one. The public server may hand out empty pages and one actor twice.
func (w *walk) turnPages(ctx context.Context) {
	w.answered(ctx, "CreateActor", w.creation(w.second()), want{"actor.status", "STATUS_SUSPENDED"})
	var seen []string
	for token := ""; w.difference == nil; {
		page := w.answered(ctx, "ListActors", fmt.Sprintf("page_size: 1 atespace: %q page_token: %q", w.atespace, token))
		for _, name := range []string{w.actor, w.second()} {
			if field(page, "actors[actor_id="+name+"].actor_id") != none && !slices.Contains(seen, name) {
				seen = append(seen, name)
			}
		}
		if token = field(page, "next_page_token"); token == "" {
			break
		}
	}
	if w.difference == nil && len(seen) != 2 {
		w.difference = fmt.Errorf("ListActors: the pages of %s have the actors %q, not both", w.atespace, seen)
	}
}

func (w *walk) boot(ctx context.Context) {
	w.runs(ctx, w.second(), " boot: true")
	w.rests(ctx, "SuspendActor", w.second(), "STATUS_SUSPENDED")
}

func (w *walk) clear(ctx context.Context) {
	for _, name := range []string{w.second(), w.actor} {
		w.answered(ctx, "DeleteActor", w.ref(name))
		w.refused(ctx, "GetActor", w.ref(name), codes.NotFound, "Actor %s not found", name)
		w.refused(ctx, "DeleteActor", w.ref(name), codes.NotFound, "Actor %s not found", name)
	}
	named := fmt.Sprintf("name: %q", w.atespace)
	w.answered(ctx, "DeleteAtespace", named)
	w.refused(ctx, "GetAtespace", named, codes.NotFound, "Atespace %s not found", w.atespace)
}

// runs wakes an actor: the answer says where it runs.
func (w *walk) runs(ctx context.Context, name, flags string) protoreflect.Message {
	answer := w.answered(ctx, "ResumeActor", w.ref(name)+flags,
		want{"actor.actor_id", name},
		want{"actor.status", "STATUS_RUNNING"},
		want{"actor.ateom_pod_namespace", some},
		want{"actor.ateom_pod_name", some},
		want{"actor.ateom_pod_uid", some},
		want{"actor.worker_pool_name", some},
		want{"actor.in_progress_snapshot", none})
	if address := field(answer, "actor.ateom_pod_ip"); w.difference == nil {
		if _, err := netip.ParseAddr(address); err != nil {
			w.difference = fmt.Errorf("ResumeActor: actor.ateom_pod_ip is no address: %w", err)
		}
	}
	return answer
}

// rests puts an actor to rest: it holds no worker any more.
func (w *walk) rests(ctx context.Context, method, name, status string, more ...want) {
	answer := w.answered(ctx, method, w.ref(name),
		want{"actor.actor_id", name},
		want{"actor.status", status},
		want{"actor.ateom_pod_namespace", none},
		want{"actor.ateom_pod_name", none},
		want{"actor.ateom_pod_ip", none},
		want{"actor.worker_pool_name", none},
		want{"actor.in_progress_snapshot", none})
	w.check(method, answer, more...)
}

func (w *walk) second() string { return w.actor + "-2" }

func (w *walk) ref(name string) string {
	return fmt.Sprintf("actor_ref {atespace: %q name: %q}", w.atespace, name)
}

func (w *walk) creation(name string) string {
	return fmt.Sprintf("%s actor_template_namespace: %q actor_template_name: %q", w.ref(name), w.namespace, w.template)
}

// answered calls a method that must succeed, with these fields in its answer.
func (w *walk) answered(ctx context.Context, method, request string, wants ...want) protoreflect.Message {
	if w.difference != nil {
		return nil
	}
	answer, refusal, malformed := w.api.call(ctx, method, request)
	if refusal != nil {
		w.difference = fmt.Errorf("%s {%s}: refused with %s %q", method, request, status.Code(refusal), status.Convert(refusal).Message())
	} else if malformed != nil {
		w.difference = fmt.Errorf("%s {%s}: %w", method, request, malformed)
	}
	w.check(fmt.Sprintf("%s {%s}", method, request), answer, wants...)
	if w.difference != nil {
		return nil
	}
	fmt.Printf("ok  %s {%s}: %s\n", method, request, answer.Interface())
	return answer
}

// refused calls a method that must fail, with exactly this code and text.
func (w *walk) refused(ctx context.Context, method, request string, code codes.Code, format string, arguments ...any) {
	if w.difference != nil {
		return
	}
	text := fmt.Sprintf(format, arguments...)
	_, refusal, malformed := w.api.call(ctx, method, request)
	got := status.Convert(refusal)
	if got.Code() != code || got.Message() != text {
		w.difference = fmt.Errorf("%s {%s}: answered %s %q, not %s %q", method, request, got.Code(), got.Message(), code, text)
	} else if malformed != nil {
		w.difference = fmt.Errorf("%s {%s}: %w", method, request, malformed)
	} else {
		fmt.Printf("ok  %s {%s}: %s %q\n", method, request, code, text)
	}
}

func (w *walk) check(where string, answer protoreflect.Message, wants ...want) {
	for _, want := range wants {
		if w.difference != nil {
			return
		}
		if got := field(answer, want.path); got != want.value && (want.value != some || got == none) {
			w.difference = fmt.Errorf("%s: %s is %q, not %q", where, want.path, got, want.value)
		}
	}
}

// field reads a.b[c=d].e, where [c=d] is the first element of a list whose c is d. What is not set is empty.
func field(message protoreflect.Message, path string) string {
	if message == nil {
		return none
	}
	part, rest, deeper := strings.Cut(path, ".")
	part, filter, filtered := strings.Cut(strings.TrimSuffix(part, "]"), "[")
	described := message.Descriptor().Fields().ByName(protoreflect.Name(part))
	if described == nil {
		panic(fmt.Sprintf("%s has no field %q", message.Descriptor().FullName(), part))
	}
	value := message.Get(described)
	switch {
	case !message.Has(described):
		return none
	case filtered:
		key, wanted, _ := strings.Cut(filter, "=")
		for i := range value.List().Len() {
			if element := value.List().Get(i).Message(); field(element, key) == wanted {
				return field(element, rest)
			}
		}
		return none
	case deeper:
		return field(value.Message(), rest)
	case described.IsMap():
		var entries []string
		value.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
			entries = append(entries, key.String()+":"+value.String())
			return true
		})
		slices.Sort(entries)
		return strings.Join(entries, ",")
	case described.Enum() != nil:
		if named := described.Enum().Values().ByNumber(value.Enum()); named != nil {
			return string(named.Name())
		}
		return fmt.Sprint(value.Enum())
	default:
		return value.String()
	}
}
