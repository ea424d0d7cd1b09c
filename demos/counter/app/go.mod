module ate.dev/demos/counter

go 1.24
