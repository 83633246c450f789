"""What is, or will be, in the way of counting on this node: pure checks over facts that thin readers gather."""
