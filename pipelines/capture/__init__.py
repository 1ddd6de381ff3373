"""The capture service: `capture` makes the parts of a run, `reader` → `main_loop` → `encoder` → `committer` is an event's way into bronze."""
