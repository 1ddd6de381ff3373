"""`ExtractNewDocumentState` for records. Start at `new_document_state`; the options are `cdc_core.properties.unwrap`."""
