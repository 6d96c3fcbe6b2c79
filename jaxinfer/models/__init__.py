"""One decoder for every family: a family is a table, not a copy (see ``families``)."""
