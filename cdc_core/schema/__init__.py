"""From documents to columns: observed types (`shape`), the columns for them (`evolution`), and values for the columns
(`cast`).
"""
