"""`ExtractNewDocumentState` for records: start at `new_document_state`. Its options are `cdc_core.properties.unwrap`."""
