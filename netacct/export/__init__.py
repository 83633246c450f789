"""What leaves the agent: metrics and the HTTP server that serves them."""
