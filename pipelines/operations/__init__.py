"""A module a command that looks after a pipeline: status, check, maintain, rebuild, repair, cut, schema, quarantine, unwrap."""
