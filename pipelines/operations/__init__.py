"""One module per command that operates a pipeline: status, check, maintain, rebuild, repair, cut, schema, quarantine, unwrap."""
