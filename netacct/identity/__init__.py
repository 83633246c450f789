"""Which pod owns which address: the lease book, and a file for each source."""
