// Empty on purpose: with an assembly file in the package the Go compiler accepts
// the functions without body in compile.go, whose bodies are linked by name.
