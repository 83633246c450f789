"""`netacct demo`: a node, pods and peers in namespaces of their own, real traffic, counted without the agent."""
