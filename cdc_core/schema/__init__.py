"""From documents to columns: what was seen (`shape`), the columns that hold it (`evolution`), and a document as their values (`cast`)."""
