"""Names, literals, types and MERGE as Spark SQL writes them."""
