package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// noCount is answered where there is no directory to count in: the actor has no volume.
const noCount = -1

// countFile is a number in the file "count", replaced as a whole so that a process
// killed at any moment leaves the old number or the new one.
type countFile struct {
	dir string
}

func (c countFile) path() string {
	return filepath.Join(c.dir, "count")
}

func (c countFile) read() (int64, error) {
	if _, err := os.Stat(c.dir); errors.Is(err, fs.ErrNotExist) {
		return noCount, nil
	}
	content, err := os.ReadFile(c.path())
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	count, err := strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s holds no number: %w", c.path(), err)
	}
	return count, nil
}

// add returns the new count; a step of 0 only reads.
func (c countFile) add(step int64) (int64, error) {
	count, err := c.read()
	if err != nil || count == noCount || step == 0 {
		return count, err
	}
	return count + step, c.replace(fmt.Sprintln(count + step))
}

func (c countFile) replace(content string) error {
	temporary, err := os.CreateTemp(c.dir, ".count-")
	if err != nil {
		return err
	}
	defer os.Remove(temporary.Name()) // finds nothing once renamed
	_, err = temporary.WriteString(content)
	// Else a crash of the machine could leave the new name with no content.
	err = errors.Join(err, temporary.Sync(), temporary.Close())
	if err != nil {
		return err
	}
	return os.Rename(temporary.Name(), c.path())
}
