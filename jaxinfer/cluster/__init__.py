"""Work over the machines of a cluster."""
