"""A real Kubernetes cluster on one machine, in namespaces: see docs/cluster-tests.md."""
