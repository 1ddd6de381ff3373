"""The vocabulary and the semantics of MongoDB change data capture: pure functions over events, documents and schemas."""
