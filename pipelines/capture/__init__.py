"""The capture service: `capture` runs it once; an event passes `reader` → `main_loop` → `encoder` → `committer` into bronze."""
