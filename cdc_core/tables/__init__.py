"""Tables without Delta's engine: where they lie (`layout`), who may write them (`claims`), how they are defined (`definition`)."""
