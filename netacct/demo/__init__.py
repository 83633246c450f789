"""`netacct demo`: a node, pods and peers in namespaces of their own, real traffic, and a count made without the agent."""
